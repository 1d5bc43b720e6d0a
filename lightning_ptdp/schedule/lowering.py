"""Lowering of compute orders to full programs with communication, reductions and gathers."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from operator import itemgetter

from lightning_ptdp.schedule.actions import (
    COMPUTE,
    MESSAGES,
    Action,
    ActionKind,
    Channel,
    Schedule,
    schedule_error,
)
from lightning_ptdp.schedule.unit_run import UnitTimes, run_compute_order

_F = ActionKind.FORWARD


def lower(order: Schedule) -> Schedule:
    """Add communication and reductions to the compute orders of all ranks.

    If the order can run at all, the result has no deadlock. The orders first run with unit times
    (unit_run.py), where messages wait for as long as needed. The actions are then placed by these
    rules:

    - A receive is posted one computation ahead of the one that needs it, so that the message
      travels during that computation. It is posted earlier if the unit-time run sends the message
      earlier: as soon as the receiving rank has completed the same computations as in the run at
      that time. Each receive is thus posted before its send. So the run is also possible where a
      send blocks its rank until the receive is posted.
    - A receive is not posted before its rank has completed the computations that it completes in
      the run until the previous message of the channel is sent. The previous message has arrived by
      then. So the run is also possible where a receive blocks its rank until the previous message
      of its channel has arrived, as on a GPU whose streams share a hardware queue
      (``CUDA_DEVICE_MAX_CONNECTIONS=1``).
    - The receives of a channel are posted in the order of its sends. The receive of a gradient is
      not posted before the stage's own forward (the gradient has the shape of its result).
    - A send follows its computation, after the receives of messages that are sent at the same time,
      because posting a receive does not wait, but a send may.
    - ``REDUCE`` follows the last backward (or weight gradient) of its stage, after the send that a
      neighbour waits for.

    A rank has few open receives at a time: those of its next computations, and those of messages
    that arrive early. Neighbouring stages on one rank pass their results locally, without actions.

    Args:
        order: A schedule whose programs are compute orders: forward, backward and weight actions
            only, in any order that runs.

    Returns:
        The same schedule with full programs.

    Raises:
        ScheduleError: An order is illegal or deadlocks. Completeness is checked by
            ``verify_schedule``.
    """
    times, ends = run_compute_order(order)
    programs = (
        _program(order, rank, _receives(order, rank, times, ends[rank]))
        for rank in range(len(order.programs))
    )
    return dataclasses.replace(order, programs=tuple(programs))


def compute_order(schedule: Schedule) -> Schedule:
    """Return the schedule with its computations alone, as ``lower`` takes it."""
    return _filtered(schedule, lambda action: action.kind in COMPUTE)


def _filtered(schedule: Schedule, keeps: Callable[[Action], bool]) -> Schedule:
    programs = tuple(tuple(filter(keeps, program)) for program in schedule.programs)
    return dataclasses.replace(schedule, programs=programs)


_Receive = tuple[int, int, int]
"""A message to a rank: slot of its receive, send time in the unit-time run, and position.

Slot 2i is after the rank's first i computations; slot 2i + 1 is also after their sends. The
position is that of the computation that needs the message. These are plain tuples, because there is
one per message.
"""


def _receives(order: Schedule, rank: int, times: UnitTimes, ends: list[int]) -> list[_Receive]:
    """Return the receives of ``rank``, in order."""
    messages: dict[Channel, list[tuple[int, int, int, int]]] = {}
    steps = {}
    for kind, message in MESSAGES.items():
        for stage in order.stages_of(rank):
            if _crosses(order, stage - message.step, stage):
                queue = messages.setdefault(order.channel(Action(message.receive, stage, 0)), [])
                steps[kind, stage] = (
                    times.block(kind, stage - message.step),
                    times.block(_F, stage),
                    queue,
                )
    end_times = times.ends
    done_by = _done_by(ends)
    for index, action in enumerate(order.programs[rank]):
        step = steps.get((action.kind, action.stage))
        if step is None:
            continue
        sender, forward, queue = step
        microbatch = action.microbatch or 0
        sent_at = end_times[sender + microbatch]
        # In the unit-time run the rank has completed done_by[sent_at] computations by then.
        # Receives come before messages that are sent at the same time.
        num_done = done_by[sent_at]
        behind_send = num_done and ends[num_done - 1] < sent_at
        latest = min(2 * max(index - 1, 0) + 1, 2 * num_done + behind_send)
        queue.append(
            (
                sent_at,
                latest,
                0 if action.kind is _F else 2 * done_by[end_times[forward + microbatch]] + 1,
                index,
            )
        )
    placed = [
        receive
        for receives in messages.values()
        for receive in _in_order_of_sends(receives, done_by)
    ]
    placed.sort(key=itemgetter(0, 1))
    return placed


def _done_by(ends: list[int]) -> list[int]:
    """Return the number of completed computations of a rank at each time until its last one."""
    counts = [0] * ends[0] if ends else [0]
    for count, (end, next_end) in enumerate(pairwise(ends), start=1):
        counts += [count] * (next_end - end)
    return [*counts, len(ends)]


def _in_order_of_sends(
    receives: list[tuple[int, int, int, int]], done_by: list[int]
) -> list[_Receive]:
    """Return the receives of one channel in the order of its sends.

    Each input is (sent, latest slot, earliest slot, position). No receive gets a later slot than
    one that is sent later. No receive gets a slot before its rank has completed the computations
    that it completes in the unit-time run until the previous message is sent.
    """
    if not receives:
        return []
    receives.sort()
    sent, latest, earliest, places = zip(*receives, strict=True)
    first = list(accumulate(reversed(latest), min))[::-1]
    bounds = [0, *(2 * done_by[time] + 1 for time in sent[:-1])]
    return list(zip(map(max, first, accumulate(earliest, max), bounds), sent, places, strict=True))


def _crosses(order: Schedule, source: int, target: int) -> bool:
    """Return True if a result goes from ``source`` to ``target`` over a channel."""
    return {source, target} <= set(range(order.num_stages)) and order.rank_of(
        source
    ) != order.rank_of(target)


def _program(order: Schedule, rank: int, receives: list[_Receive]) -> tuple[Action, ...]:
    computations = order.programs[rank]
    sends = {
        (kind, stage): message.send
        for kind, message in MESSAGES.items()
        for stage in order.stages_of(rank)
        if _crosses(order, stage, stage + message.step)
    }
    last_gradient = {
        action.stage: index
        for index, action in enumerate(computations, start=1)
        if action.kind is not _F
    }
    program: list[Action] = []
    pending = deque(receives)

    def post(slot: int) -> None:
        while pending and pending[0][0] <= slot:
            target = computations[pending.popleft()[2]]
            program.append(Action(MESSAGES[target.kind].receive, target.stage, target.microbatch))

    post(1)
    for index, action in enumerate(computations, start=1):
        program.append(action)
        if pending and pending[0][0] <= 2 * index:
            post(2 * index)
        send = sends.get((action.kind, action.stage))
        if send is not None:
            program.append(Action(send, action.stage, action.microbatch))
        if pending and pending[0][0] == 2 * index + 1:
            post(2 * index + 1)
        if last_gradient.get(action.stage) == index:
            program.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(program)


# ---- Gathers of sharded parameters: times at which a rank holds a chunk unsharded ----------------
#
# A chunk is gathered one computation ahead of its use, so that the messages travel during that
# computation. Once as many chunks are gathered as are allowed, the one whose next use is farthest
# away is freed first. No other order needs fewer gathers (L. A. Belady, A study of replacement
# algorithms for a virtual-storage computer, 1966)::
#
#     rank 0 of p2 v2   G0 F0.0 F0.1 G2 F2.0 F2.1 B2.0 B2.1 D2 B0.0 B0.1 D0
#
# All replicas of a rank run the same program, and so take part in the same gathers.


_GATHERS = (ActionKind.GATHER, ActionKind.FREE)
_USES = (ActionKind.FORWARD, ActionKind.BACKWARD)
"""Computations that read parameters; the gradient of a weight does not need the weight."""


def with_gathers(schedule: Schedule, max_gathered_chunks: int) -> Schedule:
    """Add gathers to a full schedule; at most ``max_gathered_chunks`` chunks of a rank are gathered."""
    programs = tuple(
        tuple(_gathered(program, max_gathered_chunks)) for program in schedule.programs
    )
    gathered = dataclasses.replace(schedule, programs=programs)
    check_gathers(gathered)
    return gathered


def without_gathers(schedule: Schedule) -> Schedule:
    """Return the schedule without its gathers."""
    return _filtered(schedule, lambda action: action.kind not in _GATHERS)


def check_gathers(schedule: Schedule) -> None:
    """Check that every chunk is gathered when it is used, and is freed in the end.

    Raises:
        ScheduleError: It is not; marks the action.
    """
    for rank, program in enumerate(schedule.programs):
        gathered: set[int] = set()
        for place, action in enumerate(program):
            stage = action.stage
            reason = ""
            if action.kind is ActionKind.GATHER:
                if stage in gathered:
                    reason = f"{action} gathers a stage that is whole"
                gathered.add(stage)
            elif action.kind is ActionKind.FREE:
                if stage not in gathered:
                    reason = f"{action} frees a stage that is not whole"
                gathered.discard(stage)
            elif action.kind in _USES and stage not in gathered:
                reason = f"{action} needs G{stage} before it, without D{stage} between them"
            if reason:
                raise schedule_error(schedule, {rank: place}, reason)
        if gathered:
            reason = f"D{min(gathered)} is missing"
            raise schedule_error(schedule, {rank: len(program)}, reason)


def _gathered(program: tuple[Action, ...], max_gathered_chunks: int) -> Iterator[Action]:
    """Yield the program with gathers."""
    uses = [action.stage for action in program if action.kind in _USES]
    upcoming: dict[int, list[int]] = {}
    for place in range(len(uses) - 1, -1, -1):
        upcoming.setdefault(uses[place], []).append(place)
    gathered: set[int] = set()

    def gather(stage: int, running: int) -> Iterator[Action]:
        if stage in gathered:
            return
        if len(gathered) >= max_gathered_chunks:
            farthest = max(gathered - {running}, key=lambda one: upcoming[one][-1])
            gathered.remove(farthest)
            yield Action(ActionKind.FREE, farthest)
        gathered.add(stage)
        yield Action(ActionKind.GATHER, stage)

    place = 0
    for action in program:
        if action.kind not in _USES:
            yield action
            continue
        stage = action.stage
        yield from gather(stage, stage)
        upcoming[stage].pop()
        place += 1
        if max_gathered_chunks > 1 and place < len(uses):
            yield from gather(uses[place], stage)
        yield action
        if not upcoming[stage]:
            gathered.remove(stage)
            yield Action(ActionKind.FREE, stage)
