"""Building blocks of schedules: compute orders, and a small language for their phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_ptdp.schedule.actions import Action, ActionKind
from lightning_ptdp.schedule.unit_run import UnitTimes

Orders = tuple[tuple[Action, ...], ...]
"""Compute actions of each rank, in order."""


def in_turns(
    stages: Sequence[int], num_microbatches: int, *phases: tuple[str, int]
) -> tuple[Action, ...]:
    """Return the compute order of one rank from its phases.

    The phase ``("F0 B1 W", 3)`` is three times the actions of its words. ``F0`` is the forward and
    ``B1`` the backward of that chunk on its next microbatch. ``W`` is the weight gradient that has
    waited longest. Actions of microbatches that do not exist are left out, so that phases may be
    written for more microbatches than there are. Without its last microbatches an order remains
    possible.

    Args:
        stages: The rank's stages by chunk.
        num_microbatches: m.
        phases: Words and their number of repetitions.
    """
    order: list[Action] = []
    next_microbatch = {(kind, chunk): 0 for kind in "FB" for chunk in range(len(stages))}
    deferred: deque[tuple[int, int]] = deque()
    for words, times in phases:
        for word in words.split() * times:
            if word == "W":
                stage, microbatch = deferred.popleft()
            else:
                chunk = int(word[1:])
                stage = stages[chunk]
                microbatch = next_microbatch[word[0], chunk]
                next_microbatch[word[0], chunk] += 1
            if word[0] == "B":
                deferred.append((stage, microbatch))
            if microbatch < num_microbatches:
                order.append(Action(ActionKind(word[0]), stage, microbatch))
    return tuple(order)


def groups(p: int, m: int, size: int | None = None) -> list[int]:
    """Return the sizes of groups of at most ``size`` microbatches (default p), largest first.

    A group never has fewer than p microbatches if there are as many.
    """
    count = min(-(-m // (size or p)), max(m // p, 1))
    base, remainder = divmod(m, count)
    return [base + (index < remainder) for index in range(count)]


def in_groups(
    stages: Sequence[int], m: int, sizes: Sequence[int], *, warmup: int, forwards_only: bool = False
) -> tuple[Action, ...]:
    """Return the compute order of one rank for groups of microbatches.

    Each group visits all chunks before the next group. The order has ``warmup`` forwards, then one
    forward and one backward in turn until all forwards are used, then the remaining backwards.
    """
    chunks = range(len(stages))
    forwards = [f"F{chunk}" for size in sizes for chunk in chunks for _ in range(size)]
    backwards = (
        []
        if forwards_only
        else [f"B{chunk}" for size in sizes for chunk in reversed(chunks) for _ in range(size)]
    )
    steady = [word for pair in zip(forwards[warmup:], backwards, strict=False) for word in pair]
    words = (*forwards[:warmup], *steady, *backwards[len(steady) // 2 :])
    return in_turns(stages, m, (" ".join(words), 1))


def weights_in_gaps(
    orders: Orders, *, num_stages: int, num_microbatches: int, limit: int
) -> Orders:
    """Insert weight gradients into orders wherever a rank would otherwise be idle.

    Forwards and backwards keep their order. Every action takes one unit of time. A rank runs the
    weight gradient that has waited longest if it has no other action to run, or if its next action
    is a forward and it holds ``limit`` activations.

    Args:
        orders: Orders without weight actions. They must run to their end if no rank ever holds more
            than ``limit`` activations.
        num_stages: p * v.
        num_microbatches: m.
        limit: Activations (one microbatch through one stage each) that a rank may hold, counted
            until the weight gradient.
    """
    times = UnitTimes(num_stages, num_microbatches)
    ranks = [_Rank(deque(order), limit) for order in orders]
    now = 0
    while any(rank.todo or rank.put_off for rank in ranks):
        moved = [rank.step(times, now) for rank in ranks]
        assert any(moved), f"orders do not fit a limit of {limit} activations"
        now += 1
    return tuple(tuple(rank.done) for rank in ranks)


class _Rank:
    """One rank of ``weights_in_gaps``."""

    def __init__(self, todo: deque[Action], limit: int) -> None:
        self.todo = todo
        self._room = limit
        self.put_off: deque[Action] = deque()
        self.done: list[Action] = []

    def step(self, times: UnitTimes, now: int) -> bool:
        """Run one action from ``now`` to ``now + 1``; return False if none can run."""
        ready = times.ready(self.todo[0]) if self.todo else None
        if (
            ready is not None
            and ready <= now
            and (self._room or self.todo[0].kind is not ActionKind.FORWARD)
        ):
            action = self.todo.popleft()
        elif self.put_off:
            action = self.put_off.popleft()
        else:
            return False
        if action.kind is ActionKind.FORWARD:
            self._room -= 1
        elif action.kind is ActionKind.BACKWARD:
            self.put_off.append(Action(ActionKind.WEIGHT, action.stage, action.microbatch))
        else:
            self._room += 1
        times.record(action, now + 1)
        self.done.append(action)
        return True
