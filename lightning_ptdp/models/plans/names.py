"""Dotted names."""

from __future__ import annotations

__all__ = ["joined"]


def joined(*parts: str) -> str:
    """The parts with dots between them; empty ones left out."""
    return ".".join(part for part in parts if part)
