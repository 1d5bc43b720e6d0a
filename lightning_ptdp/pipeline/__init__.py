"""Pipeline execution: stage cutting, transport between stages, runtime and watchdog."""

from __future__ import annotations

from typing import Any

from lightning_ptdp import schedule

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Return a name of the ``schedule`` package.

    Earlier versions defined these names here, and user programs still import them from here.
    """
    if name in schedule.__all__:
        return getattr(schedule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
