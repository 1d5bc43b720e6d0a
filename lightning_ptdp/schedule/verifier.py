"""Proof, before a process exists, that a schedule computes the complete step and cannot hang.

All ranks are run abstractly. An action is a number. A table lists the actions that must precede it,
on its own rank and on the rank at the other end of its channel. The work is linear in the number of
actions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_ptdp.schedule.actions import (
    COMPUTE,
    MESSAGES,
    TRANSFERS,
    Action,
    ActionKind,
    Channel,
    Schedule,
    ScheduleError,
    peak_in_flight,
    schedule_error,
    why_illegal,
)
from lightning_ptdp.schedule.lowering import check_gathers, without_gathers
from lightning_ptdp.schedule.unit_run import Numbers, WaitingRanks

_F = ActionKind.FORWARD
_R = ActionKind.REDUCE


def verify_schedule(schedule: Schedule, *, training: bool | None = None) -> tuple[int, ...]:
    """Check a schedule and return the peak number of activations in flight on each rank.

    A schedule that passes

    - is complete: on the stage's own rank, every stage runs each microbatch forward once and, in
      training, backward once (the weight gradient once, if there is any ``WEIGHT`` action), and is
      reduced once after its last gradient;
    - is ordered: a forward follows that of the previous stage; a backward follows its own forward
      and the backward of the next stage; a receive is posted before the action that needs it, and a
      result is sent after it was computed;
    - is matched: on every channel the receives are posted in the order in which the messages are
      sent;
    - gathers, if it has such actions: a stage's parameters are gathered when it computes;
    - cannot deadlock, even if a send blocks its rank until the receive is posted at the other end
      (rendezvous), and a receive blocks until the previous message of its channel is sent. A GPU
      whose streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) behaves like that:
      no operation starts before the operations that were queued earlier. The runtime posts sends
      and receives without blocking, which only removes waiting: every order of events that is
      possible under these rules is possible there.

    The proof does not hold if several channels of a rank share one NCCL communicator, which runs in
    order of issue. A receive that is posted early then blocks the sends after it until its message
    arrives, and 1F1B and interleaved schedules hang. Every channel (source, destination, direction)
    needs its own communicator.

    Args:
        schedule: The schedule.
        training: Whether backwards are required; by default True if the schedule has any training
            action.

    Raises:
        ScheduleError: A check failed.
    """
    if training is None:
        training = schedule.training
    if schedule.gathers:
        check_gathers(schedule)
        schedule = without_gathers(schedule)
    if len(schedule.programs) != schedule.pipeline_parallel_size:
        raise ScheduleError(
            f"{schedule.describe()} has {len(schedule.programs)} programs, but there must be "
            "one per rank"
        )
    proof = _check_each_rank(schedule)
    _check_complete(schedule, proof, training)
    _check_channels(schedule, proof)
    _check_free_of_deadlock(schedule, proof)
    return tuple(peak_in_flight(program) for program in schedule.programs)


_NEVER = -2
_ALWAYS = -1
"""Indices after those of all actions, in the bytes that mark completed actions."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages of a channel, given as the numbers of their receives.

    Attributes:
        sent: In the order of their sends.
        received: In the order of their receives.
        before: The send of the message that was received last.
    """

    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=lambda: [_ALWAYS])


class _Rule(NamedTuple):
    """Requirements of an action of one kind and stage.

    They are given as numbers of microbatch 0: add the microbatch to each.
    """

    microbatches: Container[int | None]
    number: int
    here: tuple[int, ...] = ()
    """Actions of this rank that must precede it."""
    there: int | None = None
    """Action at the other end of the channel that must precede it.

    For a computation it is the send of its message. For a send it is the posted receive. For a
    receive it is its own send, for which the channel's next receive waits: a receive itself waits
    for the send of the channel's previous message.
    """
    reduced: int = _NEVER
    """The reduction that must not have happened before."""
    queue: list[int] | None = None
    """Messages of the channel that a send or receive uses, in order.

    They are given as the numbers of their receives.
    """
    message: int = 0
    """The receive of the message that it sends or receives."""
    before: list[int] | None = None
    """The send of the message that was received last on the channel of a receive."""


@dataclass(frozen=True, slots=True)
class _Proof:
    """The programs in numbers, as far as they have been examined.

    Attributes:
        of: The numbers of actions.
        happened: Indexed by number: the actions that the schedule has.
        channels: The messages of each channel.
        rules: One rule for each action that the placement of stages allows; any other action is an
            error.
        numbers, needs: By rank, the number of each action, and the number of the remote action that
            it waits for.
    """

    of: Numbers
    happened: bytearray
    channels: dict[Channel, _Messages] = field(default_factory=dict)
    rules: dict[tuple[ActionKind, int], _Rule] = field(default_factory=dict)
    numbers: list[list[int]] = field(default_factory=list)
    needs: list[list[int]] = field(default_factory=list)

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> _Proof:
        """Create a proof with its rules, before any action is examined."""
        numbers = Numbers(schedule.num_stages, schedule.num_microbatches)
        proof = cls(
            numbers,
            bytearray(len(ActionKind) * schedule.num_stages * schedule.num_microbatches + 2),
        )
        proof.happened[_ALWAYS] = 1
        for stage in range(schedule.num_stages):
            for kind in COMPUTE if schedule.splits_backward else COMPUTE[:2]:
                proof._rule(schedule, kind, stage)
            proof.rules[_R, stage] = _Rule((None,), numbers.block(_R, stage))
        return proof

    def _rule(self, schedule: Schedule, kind: ActionKind, stage: int) -> None:
        """Add the rule of a computation and, if it takes a remote result, those of its messages."""
        block = self.of.block
        microbatches = range(schedule.num_microbatches)
        local = []
        remote = None
        for needed, source in self.of.needed(kind, stage):
            if schedule.rank_of(source) == schedule.rank_of(stage):
                local.append(block(needed, source))
                continue
            message = MESSAGES[kind]
            channel = schedule.channel(Action(message.receive, stage, 0))
            receive = block(message.receive, stage)
            remote = block(message.send, source)
            local.append(receive)
            messages = self.channels.setdefault(channel, _Messages())
            self.rules[message.receive, stage] = _Rule(
                microbatches,
                receive,
                there=remote,
                queue=messages.received,
                message=receive,
                before=messages.before,
            )
            produced = (block(kind, source),)
            self.rules[message.send, source] = _Rule(
                microbatches, remote, produced, receive, queue=messages.sent, message=receive
            )
        reduced = _NEVER if kind is _F else block(_R, stage)
        self.rules[kind, stage] = _Rule(
            microbatches, block(kind, stage), tuple(local), remote, reduced
        )


def _check_each_rank(schedule: Schedule) -> _Proof:
    """Check the actions of each rank.

    Every action must be legal, on the right rank, not repeated, after its requirements on its own
    rank, and before its reduction.
    """
    proof = _Proof.of_schedule(schedule)
    happened = proof.happened
    for rank, program in enumerate(schedule.programs):
        rules = {key: rule for key, rule in proof.rules.items() if schedule.rank_of(key[1]) == rank}
        numbers: list[int] = []
        needs: list[int] = []
        for action in program:
            rule = rules.get((action.kind, action.stage))
            if rule is None or action.microbatch not in rule.microbatches:
                raise schedule_error(
                    schedule, {rank: len(numbers)}, why_illegal(schedule, action, rank)
                )
            _, first, local, remote, reduced, queue, message, before = rule
            microbatch = action.microbatch or 0
            number = first + microbatch
            wrong = happened[number] or happened[reduced]
            for needed in local:
                wrong |= not happened[needed + microbatch]
            if wrong:
                raise schedule_error(
                    schedule, {rank: len(numbers)}, _why_wrong(proof, rule, action)
                )
            if queue is not None:
                queue.append(message + microbatch)
            happened[number] = 1
            numbers.append(number)
            need = _ALWAYS if remote is None else remote + microbatch
            if before is not None:
                need, before[0] = before[0], need
            needs.append(need)
        proof.numbers.append(numbers)
        proof.needs.append(needs)
    return proof


def _why_wrong(proof: _Proof, rule: _Rule, action: Action) -> str:
    microbatch = action.microbatch or 0
    if proof.happened[rule.number + microbatch]:
        return f"{action} happens twice"
    for needed in rule.here:
        if not proof.happened[needed + microbatch]:
            return f"{action} needs {proof.of.action(needed + microbatch)} before it"
    return f"{action} comes after R{action.stage}: its gradient would not be reduced"


def _check_complete(schedule: Schedule, proof: _Proof, training: bool) -> None:
    """Check that no action is missing."""
    m = schedule.num_microbatches
    for (kind, stage), rule in proof.rules.items():
        expected = (
            (1 if kind is _R else m)
            if training or kind in (_F, MESSAGES[_F].send, MESSAGES[_F].receive)
            else 0
        )
        count = proof.happened.count(1, rule.number, rule.number + m)
        if count == expected:
            continue
        rank = schedule.rank_of(stage)
        end = {rank: len(schedule.programs[rank])}
        if count > expected:
            raise schedule_error(
                schedule,
                end,
                f"stage {stage} has {kind} actions, but this schedule is not for training",
            )
        missing = proof.of.action(proof.happened.index(0, rule.number))
        raise schedule_error(schedule, end, f"{missing} is missing")


def _check_channels(schedule: Schedule, proof: _Proof) -> None:
    """Check that the messages of each channel are received in the order of their sends.

    At this point all of them are known to exist.
    """
    for channel, messages in proof.channels.items():
        pairs = zip(messages.sent, messages.received, strict=True)
        mismatch = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if mismatch is None:
            continue
        matching, second = map(proof.of.action, mismatch)
        message = TRANSFERS[second.kind]
        first = Action(message.send, matching.stage - message.step, matching.microbatch)
        source = schedule.programs[channel.source]
        destination = schedule.programs[channel.destination]
        raise schedule_error(
            schedule,
            {channel.source: source.index(first), channel.destination: destination.index(second)},
            f"rank {channel.source} sends {first} where rank {channel.destination} receives "
            f"{second} ({channel.direction})",
        )


def _check_free_of_deadlock(schedule: Schedule, proof: _Proof) -> None:
    """Run all ranks to check that they do not deadlock."""
    done = bytearray(len(proof.happened))
    done[_ALWAYS] = 1
    ranks = WaitingRanks()

    def run(numbers: list[int], needs: list[int]) -> Iterator[int]:
        waiting = ranks.waiting
        for number, need in zip(numbers, needs, strict=True):
            if not done[need]:
                yield need
            done[number] = 1
            if number in waiting:  # saves a call for each action
                ranks.notify(number)

    ranks.run([run(*rank) for rank in zip(proof.numbers, proof.needs, strict=True)])
    stuck = {
        rank: sum(done[number] for number in proof.numbers[rank])
        for rank in sorted(ranks.waiting.values())
    }
    if stuck:
        description = ", ".join(
            f"rank {rank} at {schedule.programs[rank][position]}"
            for rank, position in stuck.items()
        )
        raise schedule_error(
            schedule,
            stuck,
            "deadlock if sends wait for their receives, and receives for the message before "
            f"theirs: {description}",
        )
