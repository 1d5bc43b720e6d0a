"""Degrees of parallelism, coordinates of ranks, placement of stages, and process groups."""

from __future__ import annotations

__all__: list[str] = []
