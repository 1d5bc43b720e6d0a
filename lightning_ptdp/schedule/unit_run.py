"""Unit-time run of the compute orders of all ranks.

Every computation takes one unit of time, and messages wait for as long as needed. The run gives all
computations one global order, from which lowering.py places communication. Actions are numbers here
and in the proof (verifier.py), because large schedules have millions.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    programs, existing = _numbered(order, times)
    ends: tuple[list[int], ...] = tuple([] for _ in programs)
    waiting: dict[int, int] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        missing = _advance(programs[rank], ends[rank], times, waiting, ready)
        if missing is None:
            continue
        if order.rank_of(times.action(missing).stage) == rank:
            position = len(ends[rank])
            raise schedule_error(
                order,
                {rank: position},
                f"{order.programs[rank][position]} needs {times.action(missing)} before it",
            )
        waiting[missing] = rank
    if waiting:
        raise _deadlock(
            order,
            {rank: len(ends[rank]) for rank in sorted(waiting.values())},
            times,
            waiting,
            existing,
        )
    return times, ends


def _advance(
    program: list[int],
    rank_ends: list[int],
    times: UnitTimes,
    waiting: dict[int, int],
    ready: list[int],
) -> int | None:
    """Run all computations that a rank can run now, and wake the ranks that wait for them.

    Returns:
        The missing requirement of the next computation, or None at the end.
    """
    ends = times.ends
    needs = times.needs
    m = times.num_microbatches
    now = rank_ends[-1] if rank_ends else 0
    for position in range(len(rank_ends), len(program)):
        number = program[position]
        for distance in needs[number // m]:
            end = ends[number + distance]
            if not end:
                return number + distance
            now = max(now, end)
        now += 1
        ends[number] = now
        rank_ends.append(now)
        if number in waiting:
            ready.append(waiting.pop(number))
    return None


def _deadlock(
    order: Schedule,
    stuck: dict[int, int],
    times: UnitTimes,
    waiting: dict[int, int],
    existing: bytearray,
) -> ScheduleError:
    awaited = {rank: number for number, rank in waiting.items()}
    description = ", ".join(
        f"rank {rank} at {order.programs[rank][position]} waits for {times.action(awaited[rank])}"
        + ("" if existing[awaited[rank]] else ", which is missing")
        for rank, position in stuck.items()
    )
    return schedule_error(order, stuck, f"the order of computation deadlocks: {description}")


def _numbered(order: Schedule, times: UnitTimes) -> tuple[list[list[int]], bytearray]:
    """Return the numbers of all computations by rank, and a table of the existing numbers.

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
                reason = (
                    f"{action} is not a computation. Communication and reductions are added by "
                    "lowering"
                )
                reason = why_illegal(order, action, rank) if action.kind in COMPUTE else reason
                raise schedule_error(order, {rank: len(numbers)}, reason)
            number = block + microbatch
            if existing[number]:
                raise schedule_error(order, {rank: len(numbers)}, f"{action} happens twice")
            existing[number] = 1
            numbers.append(number)
        programs.append(numbers)
    return programs, existing
