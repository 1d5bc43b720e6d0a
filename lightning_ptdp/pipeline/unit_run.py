"""The compute orders of all ranks run on paper: every computation takes one unit of time, and messages wait for as long as needed.

That gives all computations one global order, from which lowering.py places communication.
"""

from __future__ import annotations

from lightning_ptdp.pipeline.actions import Action, ActionKind, Schedule
from lightning_ptdp.pipeline.schedule_error import schedule_error

__all__ = ["COMPUTE", "UnitTimes", "run_compute_order"]

COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
"""What occupies a rank; compute orders have nothing else."""


class UnitTimes:
    """When each computation ended, as far as the run has come.

    Args:
        num_stages: p * v.
        num_microbatches: m.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        forward, backward, weight = COMPUTE
        self._ends = {kind: [[0] * num_microbatches for _ in range(num_stages)] for kind in COMPUTE}
        self._needs: dict[ActionKind, list[tuple[tuple[ActionKind, int], ...]]] = {
            forward: [((forward, stage - 1),) if stage else () for stage in range(num_stages)],
            backward: [((forward, stage), (backward, stage + 1)) for stage in range(num_stages - 1)],
            weight: [((backward, stage),) for stage in range(num_stages)],
        }
        self._needs[backward].append(((forward, num_stages - 1),))

    def end(self, kind: ActionKind, stage: int, microbatch: int) -> int:
        """When a computation ended; 0 if it has not run yet."""
        return self._ends[kind][stage][microbatch]

    def record(self, action: Action, end: int) -> None:
        """``action`` ended at ``end`` (1 or later)."""
        self._ends[action.kind][action.stage][action.microbatch or 0] = end

    def ready(self, action: Action) -> int | None:
        """From when on ``action`` can run; None if something that it needs has not run yet."""
        latest, microbatch = 0, action.microbatch or 0
        for kind, stage in self._needs[action.kind][action.stage]:
            end = self._ends[kind][stage][microbatch]
            if not end:
                return None
            if end > latest:
                latest = end
        return latest

    def missing(self, action: Action) -> Action:
        """The first thing that ``action`` needs and that has not run yet; call it where ``ready`` is None."""
        return next(
            Action(kind, stage, action.microbatch)
            for kind, stage in self._needs[action.kind][action.stage]
            if not self._ends[kind][stage][action.microbatch or 0]
        )


def run_compute_order(order: Schedule) -> tuple[UnitTimes, tuple[tuple[int, ...], ...]]:
    """Run the computations of all ranks.

    Args:
        order: A schedule whose programs are compute orders: forward, backward and weight actions only.

    Returns:
        When each computation ends, and the same by rank and position.

    Raises:
        ScheduleError: An action is illegal, on the wrong rank or repeated, or the ranks come to stand still; the reason says where.
    """
    existing = _check_actions(order)
    times = UnitTimes(order.num_stages, order.num_microbatches)
    ends: list[list[int]] = [[] for _ in order.programs]
    waiting: dict[Action, int] = {}
    ready = list(range(len(order.programs)))
    while ready:
        rank = ready.pop()
        program, done = order.programs[rank], ends[rank]
        while len(done) < len(program):
            action = program[len(done)]
            start = times.ready(action)
            if start is None:
                missing = times.missing(action)
                if order.rank_of(missing.stage) == rank:
                    raise schedule_error(order, {rank: len(done)}, f"{action} needs {missing} before it")
                waiting[missing] = rank
                break
            done.append(max(start, done[-1] if done else 0) + 1)
            times.record(action, done[-1])
            if waiting and action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        stuck = {rank: len(ends[rank]) for rank in sorted(waiting.values())}
        awaited = {rank: action for action, rank in waiting.items()}
        what = ", ".join(
            f"rank {rank} at {order.programs[rank][at]} waits for {awaited[rank]}"
            + ("" if awaited[rank] in existing else ", which is missing")
            for rank, at in stuck.items()
        )
        raise schedule_error(order, stuck, f"the order of computation comes to stand still: {what}")
    return times, tuple(tuple(done) for done in ends)


def _check_actions(order: Schedule) -> set[Action]:
    """Every action is a computation that exists, on its rank, once; returns them all."""
    ranks = [order.rank_of(stage) for stage in range(order.num_stages)]
    if len(order.programs) != order.pipeline_parallel_size:
        raise schedule_error(order, {}, f"there are {len(order.programs)} compute orders: one a rank is needed")
    stages, microbatches = range(order.num_stages), range(order.num_microbatches)
    seen: set[Action] = set()
    for rank, program in enumerate(order.programs):
        for position, action in enumerate(program):
            at = {rank: position}
            if action.kind not in COMPUTE:
                raise schedule_error(
                    order, at, f"{action} is not a computation: communication and reductions are added by lowering"
                )
            if action.microbatch not in microbatches or action.stage not in stages:
                raise schedule_error(
                    order, at, f"{action} does not exist: stages are 0 to {stages[-1]}, microbatches are 0 to {microbatches[-1]}"
                )
            if ranks[action.stage] != rank:
                raise schedule_error(
                    order, at, f"{action} is on rank {rank}, but stage {action.stage} is on rank {ranks[action.stage]}"
                )
            if action in seen:
                raise schedule_error(order, at, f"{action} happens twice")
            seen.add(action)
    return seen
