"""Unit-time run of the compute orders of all ranks.

Every computation takes one unit of time, and messages wait for as long as needed. The run gives all
computations one global order, from which lowering.py places communication. Actions are numbers here
and in the proof (verifier.py), because large schedules have millions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_ptdp.schedule.actions import (
    COMPUTE,
    OF_STAGES,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    schedule_error,
    why_illegal,
)

_KINDS = tuple(ActionKind)
_POSITION = {kind: position for position, kind in enumerate(_KINDS)}
_NEEDS = {
    ActionKind.FORWARD: ((ActionKind.FORWARD, -1),),
    ActionKind.BACKWARD: ((ActionKind.FORWARD, 0), (ActionKind.BACKWARD, 1)),
    ActionKind.WEIGHT: ((ActionKind.BACKWARD, 0),),
}


class Numbers:
    """Numbering of actions.

    The action of kind k, stage s and microbatch i has the number ``block(k, s) + i``. Computations
    have the smallest numbers.

    Args:
        num_stages: p * v.
        num_microbatches: m.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches

    def block(self, kind: ActionKind, stage: int) -> int:
        """Return the number of a stage's action for the first microbatch."""
        return (_POSITION[kind] * self.num_stages + stage) * self.num_microbatches

    def number(self, action: Action) -> int:
        """Return the number of an action."""
        return self.block(action.kind, action.stage) + (action.microbatch or 0)

    def action(self, number: int) -> Action:
        """Return the action of a number."""
        block, microbatch = divmod(number, self.num_microbatches)
        position, stage = divmod(block, self.num_stages)
        kind = _KINDS[position]
        return Action(kind, stage, None if kind in OF_STAGES else microbatch)

    def needed(self, kind: ActionKind, stage: int) -> Iterator[tuple[ActionKind, int]]:
        """Yield the computations, as (kind, stage), that one needs on the same microbatch."""
        yield from (
            (needed_kind, stage + step)
            for needed_kind, step in _NEEDS[kind]
            if stage + step in range(self.num_stages)
        )


class UnitTimes(Numbers):
    """End of each computation, as far as the run has come.

    Args:
        num_stages: p * v.
        num_microbatches: m.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        super().__init__(num_stages, num_microbatches)
        self.ends = [0] * (len(COMPUTE) * num_stages * num_microbatches)
        """End of each computation, 1 or later; 0 if it has not run yet."""
        self.needs = [
            tuple(
                self.block(*needed) - self.block(kind, stage) for needed in self.needed(kind, stage)
            )
            for kind in COMPUTE
            for stage in range(num_stages)
        ]
        """For each block in turn, the requirements of its computations as distances in numbers."""

    def record(self, action: Action, end: int) -> None:
        """Record that ``action`` ended at ``end`` (1 or later)."""
        self.ends[self.number(action)] = end

    def ready(self, action: Action) -> int | None:
        """Return the earliest start of ``action``; None if a requirement has not run yet."""
        latest = 0
        number = self.number(action)
        for distance in self.needs[number // self.num_microbatches]:
            end = self.ends[number + distance]
            if not end:
                return None
            latest = max(latest, end)
        return latest


class WaitingRanks:
    """Ranks that run in turns, each as far as it can.

    Attributes:
        waiting: For each awaited event, the rank that is resumed by it.
        awaited: For each rank that waits, the event. Several ranks can wait for one event only if
            they deadlock.
    """

    def __init__(self) -> None:
        self.waiting: dict[Any, int] = {}
        self.awaited: dict[int, Any] = {}
        self._ready: list[int] = []

    def run(self, ranks: Sequence[Iterator[Any]]) -> None:
        """Run iterators that yield the event that they wait for, until none can continue.

        The order in which they advance does not matter.
        """
        self._ready += range(len(ranks))
        while self._ready:
            rank = self._ready.pop()
            event = next(ranks[rank], None)
            if event is not None:
                self.waiting[event] = rank
                self.awaited[rank] = event

    def notify(self, event: Any) -> None:
        """Resume the rank that waits for ``event``, if there is one."""
        if event in self.waiting:
            rank = self.waiting.pop(event)
            del self.awaited[rank]
            self._ready.append(rank)


def run_compute_order(order: Schedule) -> tuple[UnitTimes, tuple[list[int], ...]]:
    """Run the computations of all ranks.

    Args:
        order: A schedule whose programs are compute orders: forward, backward and weight actions
            only.

    Returns:
        The end of each computation, and the same by rank and position.

    Raises:
        ScheduleError: An action is illegal, on the wrong rank or repeated, or the ranks deadlock;
            the reason names the place.
    """
    times = UnitTimes(order.num_stages, order.num_microbatches)
    programs = _numbered(order, times)
    ends: tuple[list[int], ...] = tuple([] for _ in programs)
    ranks = WaitingRanks()
    ranks.run([_advance(*rank, times, ranks) for rank in zip(programs, ends, strict=True)])
    if ranks.awaited:
        awaited = {rank: times.action(number) for rank, number in ranks.awaited.items()}
        raise _deadlock(order, {rank: len(ends[rank]) for rank in sorted(awaited)}, awaited)
    return times, ends


def _advance(
    program: list[int], rank_ends: list[int], times: UnitTimes, ranks: WaitingRanks
) -> Iterator[int]:
    """Run the computations of a rank; yield each missing requirement."""
    ends = times.ends
    needs = times.needs
    m = times.num_microbatches
    waiting = ranks.waiting
    now = 0
    for number in program:
        for distance in needs[number // m]:
            if not ends[number + distance]:
                yield number + distance
            now = max(now, ends[number + distance])
        now += 1
        ends[number] = now
        rank_ends.append(now)
        if number in waiting:  # saves a call for each action
            ranks.notify(number)


def _deadlock(order: Schedule, stuck: dict[int, int], awaited: dict[int, Action]) -> ScheduleError:
    """Return the error of ranks that wait at the positions ``stuck`` for actions."""
    descriptions = []
    for rank, position in stuck.items():
        action = order.programs[rank][position]
        owner = order.rank_of(awaited[rank].stage)
        if owner == rank:
            reason = f"{action} needs {awaited[rank]} before it"
            return schedule_error(order, {rank: position}, reason)
        missing = "" if awaited[rank] in order.programs[owner] else ", which is missing"
        descriptions.append(f"rank {rank} at {action} waits for {awaited[rank]}{missing}")
    reason = f"the order of computation deadlocks: {', '.join(descriptions)}"
    return schedule_error(order, stuck, reason)


def _numbered(order: Schedule, times: UnitTimes) -> list[list[int]]:
    """Return the numbers of all computations by rank.

    Every action must be a computation that exists, on its rank, once.
    """
    if len(order.programs) != order.pipeline_parallel_size:
        raise schedule_error(
            order,
            {},
            f"there are {len(order.programs)} compute orders, but there must be one per rank",
        )
    microbatches = range(order.num_microbatches)
    existing = bytearray(len(times.ends))
    programs: list[list[int]] = []
    for rank, program in enumerate(order.programs):
        blocks = {
            (kind, stage): times.block(kind, stage)
            for kind in COMPUTE
            for stage in order.stages_of(rank)
        }
        numbers: list[int] = []
        for action in program:
            block = blocks.get((action.kind, action.stage))
            microbatch = action.microbatch
            if block is None or microbatch is None or microbatch not in microbatches:
                reason = why_illegal(order, action, rank)
                if action.kind not in COMPUTE:
                    reason = (
                        f"{action} is not a computation. Communication and reductions are added "
                        "by lowering"
                    )
                raise schedule_error(order, {rank: len(numbers)}, reason)
            number = block + microbatch
            if existing[number]:
                raise schedule_error(order, {rank: len(numbers)}, f"{action} happens twice")
            existing[number] = 1
            numbers.append(number)
        programs.append(numbers)
    return programs


# ---- Weight gradients in the idle units of a run -------------------------------------------------


Orders = tuple[tuple[Action, ...], ...]
"""Compute actions of each rank, in order."""


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
    while any(rank.todo or rank.deferred for rank in ranks):
        moved = [rank.step(times, now) for rank in ranks]
        assert any(moved), f"orders do not fit a limit of {limit} activations"
        now += 1
    return tuple(tuple(rank.done) for rank in ranks)


class _Rank:
    """One rank of ``weights_in_gaps``."""

    def __init__(self, todo: deque[Action], limit: int) -> None:
        self.todo = todo
        self._room = limit
        self.deferred: deque[Action] = deque()
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
        elif self.deferred:
            action = self.deferred.popleft()
        else:
            return False
        if action.kind is ActionKind.FORWARD:
            self._room -= 1
        elif action.kind is ActionKind.BACKWARD:
            self.deferred.append(Action(ActionKind.WEIGHT, action.stage, action.microbatch))
        else:
            self._room += 1
        times.record(action, now + 1)
        self.done.append(action)
        return True
