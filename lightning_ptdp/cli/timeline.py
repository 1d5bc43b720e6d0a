"""``ptdp timeline``: the picture of a pipeline schedule."""

from __future__ import annotations

__all__ = ["run"]


def run(verb: str, arguments: list[str]) -> int:
    """Simulate a schedule, print its bubble, and write the picture (.png) or a trace for Perfetto (.json)."""
    from lightning_ptdp.pipeline.timeline import main

    main(arguments)
    return 0
