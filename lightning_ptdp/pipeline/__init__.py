"""Executes a schedule: how a model is cut into stages, what crosses between them, and who notices when a rank is stuck."""

from __future__ import annotations

from typing import Any

from lightning_ptdp import schedule

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """What is a schedule's stood here before; programs of users import it from here."""
    if name in schedule.__all__:
        return getattr(schedule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
