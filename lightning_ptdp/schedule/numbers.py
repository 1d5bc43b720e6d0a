"""The actions of a schedule as numbers: large schedules have millions, and are run on paper and proven by table."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_ptdp.schedule.actions import Action, ActionKind

__all__ = ["Numbers"]

_KINDS = tuple(ActionKind)
_POSITION = {kind: position for position, kind in enumerate(_KINDS)}
_NEEDS = {
    ActionKind.FORWARD: ((ActionKind.FORWARD, -1),),
    ActionKind.BACKWARD: ((ActionKind.FORWARD, 0), (ActionKind.BACKWARD, 1)),
    ActionKind.WEIGHT: ((ActionKind.BACKWARD, 0),),
}


class Numbers:
    """Of kind k, stage s and microbatch i, an action is ``block(k, s) + i``; computations have the smallest numbers.

    Args:
        num_stages: p * v.
        num_microbatches: m.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self.num_stages, self.num_microbatches = num_stages, num_microbatches

    def block(self, kind: ActionKind, stage: int) -> int:
        """The number of a stage's action of the first microbatch."""
        return (_POSITION[kind] * self.num_stages + stage) * self.num_microbatches

    def number(self, action: Action) -> int:
        """The number of an action."""
        return self.block(action.kind, action.stage) + (action.microbatch or 0)

    def action(self, number: int) -> Action:
        """The action of a number."""
        block, microbatch = divmod(number, self.num_microbatches)
        position, stage = divmod(block, self.num_stages)
        kind = _KINDS[position]
        return Action(kind, stage, None if kind is ActionKind.REDUCE else microbatch)

    def needed(self, kind: ActionKind, stage: int) -> Iterator[tuple[ActionKind, int]]:
        """The computations, as (kind, stage), that one needs on the same microbatch."""
        yield from ((other, stage + step) for other, step in _NEEDS[kind] if stage + step in range(self.num_stages))
