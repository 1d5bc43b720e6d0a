"""User-defined schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_ptdp.base.option_types import check_types
from lightning_ptdp.schedule.actions import Action
from lightning_ptdp.world.stage_placement import StagePlacement

__all__ = ["CustomSchedule"]


@dataclass(frozen=True)
class CustomSchedule:
    """A named compute order, accepted everywhere in place of the name of a schedule.

    For example::

        def order(p, v, m):  # all forwards, then all backwards
            kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
            return [[Action(kind, rank, i) for kind in kinds for i in range(m)] for rank in range(p)]

        strategy = PTDPStrategy(pipeline_parallel_size=4, schedule=CustomSchedule("mine", order))

    Communication and gradient reductions are added, and the result is proven, as for the schedules
    of the package.

    Attributes:
        name: Name for logs and plots.
        order: Function from (p, v, m) to the compute order of each rank: forward, backward and, if
            the backward is split, weight actions, for every microbatch on every stage of the rank.
            It is called for each m that occurs (a last batch may be shorter). It must be hashable,
            which functions are, and must return the same on every rank. If processes are started
            with it, it must be a module-level function.
        placement: Placement of the stages on the ranks.

    Raises:
        ValueError: The name is empty, the order cannot be called, or the placement is unknown.
    """

    name: str
    order: Callable[[int, int, int], Sequence[Sequence[Action]]]
    placement: StagePlacement = "loop"

    def __post_init__(self) -> None:
        check_types(self)
        if not self.name:
            raise ValueError(f"name={self.name!r} must be a word, because logs and plots use it")
