"""Pipeline execution: stage cutting, transport between stages, runtime and watchdog."""

from __future__ import annotations

__all__: list[str] = []
