"""Builders of schedules by name and from text."""

from typing import Any

from lightning_ptdp.schedule import (
    Action,
    Costs,
    CustomSchedule,
    Schedule,
    Timeline,
    build_schedule,
    simulate,
)


def build(
    name: str | CustomSchedule, p: int, v: int = 1, m: int = 1, training: bool = True, **more: Any
) -> Schedule:
    return build_schedule(
        name,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        num_microbatches=m,
        training=training,
        **more,
    )


def from_text(name: str, p: int, v: int, m: int, *lines: str) -> Schedule:
    """Return a schedule from one line of actions per rank."""
    programs = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    return Schedule(name, p, v, m, programs)


def simulated(name: str, p: int, v: int = 1, m: int = 1, **costs: Any) -> Timeline:
    """Return the timeline of a schedule with these ``Costs``."""
    return simulate(build(name, p, v, m), Costs(**costs))


UNIT = {"forward": 1, "backward": 1, "weight": 1}
"""Costs of the zero-bubble papers."""
