"""Proof, before a process exists, that a schedule computes the whole step and cannot hang.

All ranks are run abstractly: an action is a number, and a table says what must have happened before it, on its own rank and on
the rank at the other end of its channel. The work is linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptdp.pipeline.actions import Action, ActionKind, Channel, Schedule, peak_in_flight

__all__ = ["ScheduleError", "verify_schedule"]

_F, _B, _W, _R = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT, ActionKind.REDUCE
_SF, _RF, _SB, _RB = (
    ActionKind.SEND_FORWARD,
    ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD,
    ActionKind.RECEIVE_BACKWARD,
)
_POSITION = {kind: position for position, kind in enumerate(ActionKind)}


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order, or would hang; the message shows where, with an arrow."""


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
    _check_channels(schedule)
    _check_free_of_deadlock(schedule, codes)
    return tuple(peak_in_flight(program) for program in schedule.programs)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an action of one kind and stage is (its code for microbatch 0) and needs; add the microbatch to every code."""

    rank: int
    code: int
    here: tuple[tuple[int, ActionKind, int], ...] = ()
    """(code, kind, stage) of what must have happened before on this rank."""
    there: int | None = None
    """The code at the other end of the channel: a computation needs the send, a send the posted receive."""


def _rules(schedule: Schedule) -> dict[tuple[ActionKind, int], _Rule]:
    """One rule for each action that the placement of stages allows; any other action is an error."""
    last = schedule.num_stages - 1
    splits = any(action.kind is _W for program in schedule.programs for action in program)
    rules: dict[tuple[ActionKind, int], _Rule] = {}

    def code(kind: ActionKind, stage: int) -> int:
        return (_POSITION[kind] * schedule.num_stages + stage) * schedule.num_microbatches

    def add(kind: ActionKind, stage: int, *here: tuple[ActionKind, int], there: tuple[ActionKind, int] | None = None) -> None:
        before = tuple((code(*item), *item) for item in here)
        rank = schedule.rank_of(stage)
        rules[kind, stage] = _Rule(rank, code(kind, stage), before, None if there is None else code(*there))

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
        if splits:
            add(_W, stage, (_B, stage))
        add(_R, stage)
    return rules


@dataclass(frozen=True, slots=True)
class _Codes:
    """The programs in numbers: the code of each action, and the code elsewhere that it waits for (-1: none)."""

    codes: list[list[int]]
    needs: list[list[int]]
    happened: bytearray
    """Indexed by code: which actions the schedule has; the last byte, index -1, is always set."""


def _check_each_rank(schedule: Schedule) -> _Codes:
    """Every action is legal, on the right rank, not repeated, and after what it needs from its own rank."""
    rules = _rules(schedule)
    m = schedule.num_microbatches
    seen = bytearray(len(ActionKind) * schedule.num_stages * m + 1)
    seen[-1] = 1
    result = _Codes([], [], seen)
    for rank, program in enumerate(schedule.programs):
        codes: list[int] = []
        needs: list[int] = []
        for position, action in enumerate(program):
            rule = rules.get((action.kind, action.stage))
            microbatch = action.microbatch
            if rule is None or rule.rank != rank:
                raise _error(schedule, {rank: position}, _why_illegal(schedule, action, rank))
            if microbatch is None:
                if action.kind is not _R:
                    raise _error(schedule, {rank: position}, f"{action} has no microbatch")
                microbatch = 0
            elif action.kind is _R or not 0 <= microbatch < m:
                raise _error(
                    schedule, {rank: position}, f"{action} does not exist: microbatches are 0 to {m - 1}, and R has none"
                )
            code = rule.code + microbatch
            if seen[code]:
                raise _error(schedule, {rank: position}, f"{action} happens twice")
            for before, kind, stage in rule.here:
                if not seen[before + microbatch]:
                    raise _error(schedule, {rank: position}, f"{action} needs {Action(kind, stage, microbatch)} before it")
            seen[code] = 1
            codes.append(code)
            needs.append(-1 if rule.there is None else rule.there + microbatch)
        result.codes.append(codes)
        result.needs.append(needs)
    return result


def _why_illegal(schedule: Schedule, action: Action, rank: int) -> str:
    if action.stage not in range(schedule.num_stages):
        return f"{action} does not exist: stages are 0 to {schedule.num_stages - 1}"
    if schedule.rank_of(action.stage) != rank:
        return f"{action} is on rank {rank}, but stage {action.stage} is on rank {schedule.rank_of(action.stage)}"
    return f"{action} has no rank to talk to: the neighbouring stage does not exist or is on the same rank"


def _check_complete(schedule: Schedule, codes: _Codes, training: bool) -> None:
    """Nothing is missing, and each stage is reduced after its last gradient."""
    m = schedule.num_microbatches
    for (kind, stage), rule in _rules(schedule).items():
        wanted = (1 if kind is _R else m) if training or kind in (_F, _SF, _RF) else 0
        found = codes.happened.count(1, rule.code, rule.code + m)
        if found == wanted:
            continue
        end = {rule.rank: len(schedule.programs[rule.rank])}
        if found > wanted:
            raise _error(schedule, end, f"stage {stage} has {kind} actions, but this is not training")
        absent = codes.happened.index(0, rule.code) - rule.code
        raise _error(schedule, end, f"{Action(kind, stage, None if kind is _R else absent)} is missing")
    for rank, program in enumerate(schedule.programs):
        reduced: set[int] = set()
        for position, action in enumerate(program):
            if action.kind is _R:
                reduced.add(action.stage)
            elif (action.kind is _B or action.kind is _W) and action.stage in reduced:
                raise _error(
                    schedule, {rank: position}, f"{action} comes after R{action.stage}: its gradient would not be reduced"
                )


def _check_channels(schedule: Schedule) -> None:
    """On every channel, the messages are received in the order in which they are sent; all of them exist by now."""
    sent: dict[Channel, list[tuple[int, int]]] = {}
    received: dict[Channel, list[tuple[int, int]]] = {}
    channels = {
        (kind, stage): (sent if kind in (_SF, _SB) else received).setdefault(schedule.channel(Action(kind, stage, 0)), [])
        for kind, stage in _rules(schedule)
        if kind in (_SF, _RF, _SB, _RB)
    }
    offset = {_SF: 1, _SB: -1, _RF: 0, _RB: 0}
    for program in schedule.programs:
        for action in program:
            messages = channels.get((action.kind, action.stage))
            if messages is not None:
                messages.append((action.stage + offset[action.kind], action.microbatch or 0))
    for channel, messages in sent.items():
        pairs = enumerate(zip(messages, received[channel], strict=True))
        wrong = next((pair for index, pair in pairs if pair[0] != pair[1]), None)
        if wrong is None:
            continue
        send, receive = (_SF, _RF) if channel.direction == "forward" else (_SB, _RB)
        first = Action(send, wrong[0][0] - offset[send], wrong[0][1])
        second = Action(receive, *wrong[1])
        source, destination = schedule.programs[channel.source], schedule.programs[channel.destination]
        marks = {channel.source: source.index(first), channel.destination: destination.index(second)}
        raise _error(
            schedule,
            marks,
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
        raise _error(schedule, stuck, f"deadlock where sends wait for their receive: {what}")


def _error(schedule: Schedule, marks: Mapping[int, int], why: str, *, around: int = 12) -> ScheduleError:
    """The error with the schedule near ``marks`` (rank -> position of the arrow; the length of the program is its end)."""
    lines = []
    for rank, program in enumerate(schedule.programs):
        if len(schedule.programs) > 16 and rank not in marks:
            continue
        center = marks.get(rank, 0)
        start, stop = max(center - around, 0), max(center, around) + around
        words = [("--> " if marks.get(rank) == i else "") + str(program[i]) for i in range(start, min(stop, len(program)))]
        if marks.get(rank) == len(program):
            words.append("--> (end)")
        line = " ".join(["…"] * (start > 0) + words + ["…"] * (stop < len(program)))
        lines.append(f"rank {rank}  {line}")
    return ScheduleError(f"{schedule.describe()}: {why}\n" + "\n".join(lines))
