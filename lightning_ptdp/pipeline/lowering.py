"""From the order of computation to a full program: where the sends, the receives and the gradient reductions go."""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections import deque
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from lightning_ptdp.pipeline.actions import Action, ActionKind, Channel, Schedule
from lightning_ptdp.pipeline.unit_run import COMPUTE, UnitTimes, run_compute_order

__all__ = ["compute_order", "lower"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_SEND = {_F: ActionKind.SEND_FORWARD, _B: ActionKind.SEND_BACKWARD}
_RECEIVE = {_F: ActionKind.RECEIVE_FORWARD, _B: ActionKind.RECEIVE_BACKWARD}


def lower(order: Schedule) -> Schedule:
    """Add communication and reductions to the compute orders of all ranks. An order that can run at all gets no deadlock.

    The orders are run on paper first (unit_run.py), with messages that wait for as long as needed. Then

    - a receive is posted one computation ahead of the one that needs it, so that the message travels during that computation;
      or as soon as its rank has done what it does on paper until the message is sent, if that is earlier. So what happens on
      paper can happen where a send blocks its rank until the receive is posted, too: each receive is posted before its send;
    - the receives of a channel are posted in the order of its sends, those of gradients not before the stage's own forward (the
      gradient has the shape of its result);
    - a send follows its computation, after the receives that are posted there: posting does not wait, a send may;
    - ``REDUCE`` follows the last backward (or weight gradient) of its stage, after the send that a neighbour waits for.

    A rank has few receives open at a time: those of the next computations, and of what arrives early. Stages that are
    neighbours on one rank hand over locally: no actions.

    Args:
        order: A schedule whose programs are compute orders: forward, backward and weight actions only, in any order that runs.

    Returns:
        The same with full programs.

    Raises:
        ScheduleError: An order is illegal or comes to stand still. Completeness is for ``verify_schedule``.
    """
    times, ends = run_compute_order(order)
    programs = []
    for rank, computations in enumerate(order.programs):
        receives = _receives(order, rank, times, ends[rank])
        programs.append(_program(order, computations, receives))
    return dataclasses.replace(order, programs=tuple(programs))


def compute_order(schedule: Schedule) -> Schedule:
    """The schedule with its computations alone: what ``lower`` takes."""
    programs = tuple(tuple(action for action in program if action.kind in COMPUTE) for program in schedule.programs)
    return dataclasses.replace(schedule, programs=programs)


class _Receive(NamedTuple):
    """A message to a rank, and where its receive goes: slot i is before the rank's i-th computation."""

    slot: int
    sent: int
    """When the message is sent in the run on paper."""
    earliest: int
    """The first possible slot."""
    action: Action


def _receives(order: Schedule, rank: int, times: UnitTimes, ends: tuple[int, ...]) -> list[_Receive]:
    """The receives of ``rank``, in order."""
    sources = {(kind, stage): _source(order, kind, stage) for kind in (_F, _B) for stage in order.stages_of(rank)}
    messages: dict[Channel, list[_Receive]] = {source.channel: [] for source in sources.values() if source is not None}
    for index, action in enumerate(order.programs[rank]):
        source = sources.get((action.kind, action.stage))
        if source is None:
            continue
        kind, stage, microbatch = action.kind, action.stage, action.microbatch or 0
        sent = times.end(kind, source.stage, microbatch)
        # On paper, the rank has ended bisect(ends, sent) computations by then, and receives come before what it sends itself.
        slot = min(max(index - 1, 0), bisect(ends, sent))
        earliest = bisect(ends, times.end(_F, stage, microbatch)) if kind is _B else 0
        messages[source.channel].append(_Receive(slot, sent, earliest, Action(_RECEIVE[kind], stage, microbatch)))
    placed = [receive for receives in messages.values() for receive in _in_order_of_sends(receives)]
    return sorted(placed, key=itemgetter(0, 1))


def _in_order_of_sends(receives: list[_Receive]) -> list[_Receive]:
    """The receives of one channel, none in a later slot than one that is sent later."""
    receives = sorted(receives, key=itemgetter(1))
    latest = list(accumulate((receive.slot for receive in reversed(receives)), min))[::-1]
    earliest = accumulate((receive.earliest for receive in receives), max)
    slots = map(max, latest, earliest)
    return [
        receive if slot == receive.slot else receive._replace(slot=slot) for slot, receive in zip(slots, receives, strict=True)
    ]


class _Source(NamedTuple):
    """Where the message that a computation takes comes from: a stage on another rank, over a channel."""

    stage: int
    channel: Channel


def _source(order: Schedule, kind: ActionKind, stage: int) -> _Source | None:
    source = stage - 1 if kind is _F else stage + 1
    if source not in range(order.num_stages) or order.rank_of(source) == order.rank_of(stage):
        return None
    return _Source(source, order.channel(Action(_RECEIVE[kind], stage, 0)))


def _sends(order: Schedule, kind: ActionKind, stage: int) -> bool:
    """Whether the result of a computation goes to another rank."""
    target = stage + 1 if kind is _F else stage - 1
    return target in range(order.num_stages) and order.rank_of(target) != order.rank_of(stage)


def _program(order: Schedule, computations: tuple[Action, ...], receives: list[_Receive]) -> tuple[Action, ...]:
    sends = {(kind, stage) for kind in (_F, _B) for stage in range(order.num_stages) if _sends(order, kind, stage)}
    last_gradient = {action.stage: index for index, action in enumerate(computations) if action.kind is not _F}
    waiting = deque(receives)
    program: list[Action] = []

    def post(slot: int) -> None:
        while waiting and waiting[0].slot <= slot:
            program.append(waiting.popleft().action)

    post(0)
    for index, action in enumerate(computations):
        program.append(action)
        post(index + 1)
        if (action.kind, action.stage) in sends:
            program.append(Action(_SEND[action.kind], action.stage, action.microbatch))
        if last_gradient.get(action.stage) == index:
            program.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(program)
