"""Executes a schedule: how a model is cut into stages, what crosses between them, and who notices
when a rank is stuck."""

from __future__ import annotations

from typing import Any

from lightning_ptdp import schedule

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Return names of the schedule package, which were here in earlier versions and are imported
    from here by user programs."""
    if name in schedule.__all__:
        return getattr(schedule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
