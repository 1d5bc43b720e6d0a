"""Proof, before a process exists, that a schedule computes the whole step and cannot hang.

All ranks are run abstractly: an action is a number, and a table says what must have happened before it, on its own rank and on
the rank at the other end of its channel. The work is linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lightning_ptdp.schedule.actions import Action, ActionKind, Channel, Schedule, peak_in_flight
from lightning_ptdp.schedule.schedule_error import ScheduleError, schedule_error

__all__ = ["ScheduleError", "verify_schedule"]

_F, _B, _W, _R = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT, ActionKind.REDUCE
_SF, _RF, _SB, _RB = (
    ActionKind.SEND_FORWARD,
    ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD,
    ActionKind.RECEIVE_BACKWARD,
)
_POSITION = {kind: position for position, kind in enumerate(ActionKind)}


def verify_schedule(schedule: Schedule, *, training: bool | None = None) -> tuple[int, ...]:
    """Check a schedule; the peak number of activations in flight on each rank.

    A schedule that passes

    - is complete: on the stage's own rank, every stage runs each microbatch forward once and, in training, backward once
      (the weight gradient once, if there is any ``WEIGHT`` action), and is reduced once after its last gradient;
    - is ordered: a forward follows that of the previous stage, a backward its own forward and the backward of the next stage;
      a receive is posted before the action that needs it and a result is sent after it was computed;
    - is matched: on every channel the receives are posted in the order in which the messages are sent;
    - cannot deadlock, even where a send blocks its rank until the receive is posted at the other end (rendezvous). The
      runtime posts sends and receives without blocking, which only removes waiting: whatever order of events is possible
      under rendezvous is possible there, so this one check covers both.

    What is not promised: that several channels of a rank may share one serial queue, such as one NCCL communicator. There a
    receive that is posted early holds up the sends behind it, and 1F1B and interleaved schedules hang. Give every channel
    (source, destination, direction) its own queue.

    Args:
        schedule: The schedule.
        training: Whether backwards are required; by default, whether the schedule has any action of training.

    Raises:
        ScheduleError: A check failed.
    """
    if training is None:
        training = schedule.training
    if len(schedule.programs) != schedule.pipeline_parallel_size:
        raise ScheduleError(f"{schedule.describe()} has {len(schedule.programs)} programs: one a rank is needed")
    codes = _check_each_rank(schedule)
    _check_complete(schedule, codes, training)
    _check_channels(schedule, codes)
    _check_free_of_deadlock(schedule, codes)
    return tuple(peak_in_flight(program) for program in schedule.programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What an action of one kind and stage is (its code for microbatch 0) and needs; add the microbatch to every code."""

    rank: int
    code: int
    here: tuple[tuple[int, ActionKind, int], ...] = ()
    """(code, kind, stage) of what must have happened before on this rank."""
    there: int | None = None
    """The code at the other end of the channel: a computation needs the send, a send the posted receive."""
    channel: Channel | None = None
    message: int = 0
    """The code of the receive of what a send or receive action carries."""
    reduced: int | None = None
    """The code of the reduction that must not have happened before."""


def _rules(schedule: Schedule) -> dict[tuple[ActionKind, int], _Rule]:
    """One rule for each action that the placement of stages allows; any other action is an error."""
    last = schedule.num_stages - 1
    rules: dict[tuple[ActionKind, int], _Rule] = {}

    def code(kind: ActionKind, stage: int) -> int:
        return (_POSITION[kind] * schedule.num_stages + stage) * schedule.num_microbatches

    def add(kind: ActionKind, stage: int, *here: tuple[ActionKind, int], there: tuple[ActionKind, int] | None = None) -> None:
        receive = (kind, stage) if kind in (_RF, _RB) else there if kind in (_SF, _SB) else None
        rules[kind, stage] = _Rule(
            rank=schedule.rank_of(stage),
            code=code(kind, stage),
            here=tuple((code(*item), *item) for item in here),
            there=None if there is None else code(*there),
            channel=None if receive is None else schedule.channel(Action(kind, stage, 0)),
            message=0 if receive is None else code(*receive),
            reduced=code(_R, stage) if kind in (_B, _W) else None,
        )

    for stage in range(last + 1):
        rank = schedule.rank_of(stage)
        if stage == 0:
            add(_F, stage)
        elif schedule.rank_of(stage - 1) == rank:
            add(_F, stage, (_F, stage - 1))
        else:
            add(_RF, stage)
            add(_F, stage, (_RF, stage), there=(_SF, stage - 1))
            add(_SB, stage, (_B, stage), there=(_RB, stage - 1))
        if stage == last:
            add(_B, stage, (_F, stage))
        elif schedule.rank_of(stage + 1) == rank:
            add(_B, stage, (_F, stage), (_B, stage + 1))
        else:
            add(_RB, stage)
            add(_B, stage, (_F, stage), (_RB, stage), there=(_SB, stage + 1))
            add(_SF, stage, (_F, stage), there=(_RF, stage + 1))
        if schedule.splits_backward:
            add(_W, stage, (_B, stage))
        add(_R, stage)
    return rules


@dataclass(frozen=True, slots=True)
class _Codes:
    """The programs in numbers: the code of each action, and the code elsewhere that it waits for (-1: none)."""

    codes: list[list[int]]
    needs: list[list[int]]
    happened: bytearray
    """Indexed by code: which actions the schedule has; the last byte, index -1, is always set, the one before it never."""
    sent: dict[Channel, list[int]]
    """The messages of each channel in the order of their sends: the codes of their receives."""
    received: dict[Channel, list[int]]


def _check_each_rank(schedule: Schedule) -> _Codes:
    """Every action is legal, on the right rank, not repeated, after what it needs from its own rank, and before its reduction."""
    rules = _rules(schedule)
    m = schedule.num_microbatches
    seen = bytearray(len(ActionKind) * schedule.num_stages * m + 2)
    seen[-1] = 1
    channels = dict.fromkeys(rule.channel for rule in rules.values() if rule.channel is not None)
    result = _Codes([], [], seen, {channel: [] for channel in channels}, {channel: [] for channel in channels})
    for rank, program in enumerate(schedule.programs):
        here = _steps(rules, rank, m, result)
        codes: list[int] = []
        needs: list[int] = []
        for action in program:
            step = here.get((action.kind, action.stage))
            if step is None or action.microbatch not in step[0]:
                raise schedule_error(schedule, {rank: len(codes)}, _why_illegal(schedule, action, rank))
            _, first, before, there, reduced, queue, message = step
            microbatch = action.microbatch or 0
            code = first + microbatch
            wrong = seen[code] or seen[reduced]
            for needed in before:
                wrong |= not seen[needed + microbatch]
            if wrong:
                why = _why_wrong(rules[action.kind, action.stage], action, seen)
                raise schedule_error(schedule, {rank: len(codes)}, why)
            if queue is not None:
                queue.append(message + microbatch)
            seen[code] = 1
            codes.append(code)
            needs.append(-1 if there is None else there + microbatch)
        result.codes.append(codes)
        result.needs.append(needs)
    return result


_Step = tuple[Container[int | None], int, tuple[int, ...], int | None, int, list[int] | None, int]


def _steps(rules: dict[tuple[ActionKind, int], _Rule], rank: int, m: int, codes: _Codes) -> dict[tuple[ActionKind, int], _Step]:
    """A rank's rules as the loop over its actions reads them: microbatches, code, codes before, code there, code of the reduction (or one
    that never happens), queue of its channel, code of the message."""
    never = len(codes.happened) - 2
    return {
        (kind, stage): (
            (None,) if kind is _R else range(m),
            rule.code,
            tuple(code for code, _, _ in rule.here),
            rule.there,
            never if rule.reduced is None else rule.reduced,
            None if rule.channel is None else (codes.received if rule.there is None else codes.sent)[rule.channel],
            rule.message,
        )
        for (kind, stage), rule in rules.items()
        if rule.rank == rank
    }


def _why_wrong(rule: _Rule, action: Action, seen: bytearray) -> str:
    microbatch = action.microbatch or 0
    if seen[rule.code + microbatch]:
        return f"{action} happens twice"
    for before, kind, stage in rule.here:
        if not seen[before + microbatch]:
            return f"{action} needs {Action(kind, stage, microbatch)} before it"
    return f"{action} comes after R{action.stage}: its gradient would not be reduced"


def _has_microbatch(action: Action, m: int) -> bool:
    """Whether the microbatch is one of the m; a reduction has none."""
    return action.microbatch is None if action.kind is _R else action.microbatch is not None and 0 <= action.microbatch < m


def _why_illegal(schedule: Schedule, action: Action, rank: int) -> str:
    if action.stage not in range(schedule.num_stages):
        return f"{action} does not exist: stages are 0 to {schedule.num_stages - 1}"
    if schedule.rank_of(action.stage) != rank:
        return f"{action} is on rank {rank}, but stage {action.stage} is on rank {schedule.rank_of(action.stage)}"
    if not _has_microbatch(action, schedule.num_microbatches):
        return f"{action} does not exist: microbatches are 0 to {schedule.num_microbatches - 1}, and only R has none"
    return f"{action} has no rank to talk to: the neighbouring stage does not exist or is on the same rank"


def _check_complete(schedule: Schedule, codes: _Codes, training: bool) -> None:
    """Nothing is missing."""
    m = schedule.num_microbatches
    for (kind, stage), rule in _rules(schedule).items():
        wanted = (1 if kind is _R else m) if training or kind in (_F, _SF, _RF) else 0
        found = codes.happened.count(1, rule.code, rule.code + m)
        if found == wanted:
            continue
        end = {rule.rank: len(schedule.programs[rule.rank])}
        if found > wanted:
            raise schedule_error(schedule, end, f"stage {stage} has {kind} actions, but this is not training")
        absent = codes.happened.index(0, rule.code) - rule.code
        raise schedule_error(schedule, end, f"{Action(kind, stage, None if kind is _R else absent)} is missing")


def _check_channels(schedule: Schedule, codes: _Codes) -> None:
    """On every channel, the messages are received in the order in which they are sent; all of them exist by now."""
    for channel, messages in codes.sent.items():
        pairs = zip(messages, codes.received[channel], strict=True)
        wrong = next(((sent, received) for sent, received in pairs if sent != received), None)
        if wrong is None:
            continue
        (sent_to, sent), (stage, received) = (divmod(message, schedule.num_microbatches) for message in wrong)
        sent_to, stage = sent_to % schedule.num_stages, stage % schedule.num_stages
        forward = channel.direction == "forward"
        first = Action(_SF if forward else _SB, sent_to - 1 if forward else sent_to + 1, sent)
        second = Action(_RF if forward else _RB, stage, received)
        source, destination = schedule.programs[channel.source], schedule.programs[channel.destination]
        raise schedule_error(
            schedule,
            {channel.source: source.index(first), channel.destination: destination.index(second)},
            f"rank {channel.source} sends {first} where rank {channel.destination} receives {second} ({channel.direction})",
        )


def _check_free_of_deadlock(schedule: Schedule, codes: _Codes) -> None:
    """Run all ranks under rendezvous sends; the order in which ranks advance does not matter, as no action disables another."""
    done = bytearray(len(codes.happened))
    done[-1] = 1
    reached = [0] * len(codes.codes)
    waiting: dict[int, int] = {}
    ready = list(range(len(codes.codes)))
    while ready:
        rank = ready.pop()
        program, needs = codes.codes[rank], codes.needs[rank]
        position = reached[rank]
        while position < len(program):
            if not done[needs[position]]:
                waiting[needs[position]] = rank
                break
            code = program[position]
            done[code] = 1
            if code in waiting:
                ready.append(waiting.pop(code))
            position += 1
        reached[rank] = position
    stuck = {rank: position for rank, position in enumerate(reached) if position < len(codes.codes[rank])}
    if stuck:
        what = ", ".join(f"rank {rank} at {schedule.programs[rank][position]}" for rank, position in stuck.items())
        raise schedule_error(schedule, stuck, f"deadlock where sends wait for their receive: {what}")
