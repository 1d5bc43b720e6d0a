"""Groups of microbatches that visit a rank's chunks one after the other, for the schedules over v chunks in loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_ptdp.schedule.actions import Action, ActionKind

__all__ = ["alternate", "groups", "in_groups"]

Unit = tuple[int, int]
"""(chunk, microbatch): what a rank computes at once."""


def groups(p: int, m: int, size: int | None = None) -> list[range]:
    """Microbatches in groups of at most ``size`` (default p), but never fewer than p if there are as many; the largest first."""
    count = min(-(-m // (size or p)), max(m // p, 1))
    least, longer = divmod(m, count)
    starts = [index * least + min(index, longer) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def in_groups(p: int, chunks: Sequence[int], m: int, size: int | None = None) -> list[Unit]:
    """Each group visits every chunk before the next group starts."""
    return [(chunk, microbatch) for group in groups(p, m, size) for chunk in chunks for microbatch in group]


def alternate(stages: Sequence[int], forwards: Sequence[Unit], backwards: Sequence[Unit], *, warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn until the forwards are used up, then backwards."""
    order = [_action(ActionKind.FORWARD, unit, stages) for unit in forwards[:warmup]]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order.append(_action(ActionKind.FORWARD, forward, stages))
        order.append(_action(ActionKind.BACKWARD, backward, stages))
    order += [_action(ActionKind.BACKWARD, unit, stages) for unit in backwards[len(steady) :]]
    return tuple(order)


def _action(kind: ActionKind, unit: Unit, stages: Sequence[int]) -> Action:
    chunk, microbatch = unit
    return Action(kind, stages[chunk], microbatch)
