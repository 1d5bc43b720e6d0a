"""From the order of computation to a full program: where the sends, the receives and the gradient
reductions go."""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import accumulate, pairwise
from operator import itemgetter

from lightning_ptdp.schedule.actions import COMPUTE, MESSAGES, Action, ActionKind, Channel, Schedule
from lightning_ptdp.schedule.unit_run import UnitTimes, run_compute_order

__all__ = ["compute_order", "lower"]

_F = ActionKind.FORWARD


def lower(order: Schedule) -> Schedule:
    """Add communication and reductions to the compute orders of all ranks. An order that can run at
    all gets no deadlock.

    The orders are run on paper first (unit_run.py), with messages that wait for as long as needed.
    Then

    - a receive is posted one computation ahead of the one that needs it, so that the message
      travels during that computation; or as soon as its rank has done what it does on paper until
      the message is sent, if that is earlier. So what happens on paper can happen where a send
      blocks its rank until the receive is posted, too: each receive is posted before its send;
    - it is not posted before its rank has done what it does on paper until the message before it on
      the channel is sent: that one has arrived by then. So what happens on paper can happen where a
      receive blocks its rank until the one before it on its channel has arrived, as on a GPU whose
      streams share a hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``);
    - the receives of a channel are posted in the order of its sends, those of gradients not before
      the stage's own forward (the gradient has the shape of its result);
    - a send follows its computation, after the receives of messages that are sent at the same time:
      posting does not wait, a send may;
    - ``REDUCE`` follows the last backward (or weight gradient) of its stage, after the send that a
      neighbour waits for.

    A rank has few receives open at a time: those of the next computations, and of what arrives
    early. Stages that are
    neighbours on one rank hand over locally: no actions.

    Args:
        order: A schedule whose programs are compute orders: forward, backward and weight actions
            only, in any order that runs.

    Returns:
        The same with full programs.

    Raises:
        ScheduleError: An order is illegal or deadlocks. Completeness is for ``verify_schedule``.
    """
    times, ends = run_compute_order(order)
    programs = (
        _program(order, rank, _receives(order, rank, times, ends[rank]))
        for rank in range(len(order.programs))
    )
    return dataclasses.replace(order, programs=tuple(programs))


def compute_order(schedule: Schedule) -> Schedule:
    """The schedule with its computations alone: what ``lower`` takes."""
    programs = tuple(
        tuple(action for action in program if action.kind in COMPUTE)
        for program in schedule.programs
    )
    return dataclasses.replace(schedule, programs=programs)


_Receive = tuple[int, int, int]
"""A message to a rank: the slot of its receive (2i is behind the rank's first i computations, 2i +
1 behind what they send, too), when the message is sent in the run on paper, and the place of the
computation that needs it. Plain tuples: there are as many as messages."""


def _receives(order: Schedule, rank: int, times: UnitTimes, ends: list[int]) -> list[_Receive]:
    """The receives of ``rank``, in order."""
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
    ended, done_by = times.ends, _done_by(ends)
    for index, action in enumerate(order.programs[rank]):
        step = steps.get((action.kind, action.stage))
        if step is None:
            continue
        sender, forward, queue = step
        microbatch = action.microbatch or 0
        sent = ended[sender + microbatch]
        # On paper, the rank has ended done_by[sent] computations by then, and receives come before
        # what is sent at the same time.
        done = done_by[sent]
        behind_send = done and ends[done - 1] < sent
        latest = min(2 * max(index - 1, 0) + 1, 2 * done + behind_send)
        queue.append(
            (
                sent,
                latest,
                0 if action.kind is _F else 2 * done_by[ended[forward + microbatch]] + 1,
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
    """Return the number of ended computations of a rank at each time, up to its last
    computation."""
    done = [0] * ends[0] if ends else [0]
    for count, (end, following) in enumerate(pairwise(ends), start=1):
        done += [count] * (following - end)
    return [*done, len(ends)]


def _in_order_of_sends(
    receives: list[tuple[int, int, int, int]], done_by: list[int]
) -> list[_Receive]:
    """The receives of one channel, each as (sent, latest slot, earliest slot, place): none in a
    later slot than one that is sent later, and none before the rank has done what it does on paper
    until the one before it is sent."""
    if not receives:
        return []
    receives.sort()
    sent, latest, earliest, places = zip(*receives, strict=True)
    first = list(accumulate(reversed(latest), min))[::-1]
    alone = [0, *(2 * done_by[time] + 1 for time in sent[:-1])]
    return list(zip(map(max, first, accumulate(earliest, max), alone), sent, places, strict=True))


def _crosses(order: Schedule, source: int, target: int) -> bool:
    """Return True if a result goes from stage to stage over a channel."""
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
    waiting = deque(receives)

    def post(slot: int) -> None:
        while waiting and waiting[0][0] <= slot:
            needed = computations[waiting.popleft()[2]]
            program.append(Action(MESSAGES[needed.kind].receive, needed.stage, needed.microbatch))

    post(1)
    for index, action in enumerate(computations, start=1):
        program.append(action)
        if waiting and waiting[0][0] <= 2 * index:
            post(2 * index)
        send = sends.get((action.kind, action.stage))
        if send is not None:
            program.append(Action(send, action.stage, action.microbatch))
        if waiting and waiting[0][0] == 2 * index + 1:
            post(2 * index + 1)
        if last_gradient.get(action.stage) == index:
            program.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(program)
