"""Actions of a rank in one training step, as data.

A schedule is one list of actions per rank. The generator writes it, the verifier proves it, the
simulator times it and the runtime executes it. No other module defines the order. Actions print and
parse as ``F3.1`` (kind, stage, microbatch)::

    rank 0  F0.0 SF0.0 RB0.0 F0.1 SF0.1 RB0.1 B0.0 B0.1 R0
    rank 1  RF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 B1.1 SB1.1 R1
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.world.axes import StagePlacement, Stages

Direction = Literal["forward", "backward"]


class ActionKind(StrEnum):
    """The ten kinds of actions; the value is the prefix in the printed form."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward, or only the input gradient in a schedule with ``WEIGHT`` actions."""
    WEIGHT = "W"
    """The gradient of the weights, in schedules that split the backward (arXiv 2401.10241)."""
    SEND_FORWARD = "SF"
    """Send this stage's output to the rank of the next stage."""
    RECEIVE_FORWARD = "RF"
    """Post the receive of this stage's input from the rank of the previous stage; do not wait."""
    SEND_BACKWARD = "SB"
    """Send the gradient of this stage's input to the rank of the previous stage."""
    RECEIVE_BACKWARD = "RB"
    """Post the receive of the gradient of this stage's output; do not wait.

    The gradient comes from the rank of the next stage.
    """
    REDUCE = "R"
    """Launch the reduction of this stage's gradients over the data-parallel group.

    It has no microbatch.
    """
    GATHER = "G"
    """Start to gather this stage's sharded parameters; do not wait. It has no microbatch."""
    FREE = "D"
    """Drop the other replicas' parts of this stage's parameters. It has no microbatch."""


COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
"""Actions that occupy a rank; a compute order has no others."""

OF_STAGES = (ActionKind.REDUCE, ActionKind.GATHER, ActionKind.FREE)
"""Actions without a microbatch."""


class Message(NamedTuple):
    """Kinds of the actions that send a computation's result to another rank.

    The result goes to the stage ``step`` further. There are no messages if the same rank holds that
    stage.
    """

    send: ActionKind
    receive: ActionKind
    step: int
    direction: Direction


MESSAGES = {
    ActionKind.FORWARD: Message(ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, 1, "forward"),
    ActionKind.BACKWARD: Message(
        ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD, -1, "backward"
    ),
}
"""The messages that the result of a computation needs."""

TRANSFERS = {
    kind: message for message in MESSAGES.values() for kind in (message.send, message.receive)
}
"""The message of each kind of send and receive."""

_PRINTED = re.compile(r"([A-Z]+)(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    Attributes:
        kind: Its kind.
        stage: Global index of the stage, 0 to p*v-1.
        microbatch: Index of the microbatch; None for an action of ``OF_STAGES``.
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.microbatch is None:
            return f"{self.kind}{self.stage}"
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action printed as ``text``: ``Action.parse("SF3.1")``.

        Raises:
            ValueError: ``text`` is not the printed form of an action.
        """
        match = _PRINTED.fullmatch(text)
        kinds = {kind.value: kind for kind in ActionKind}
        if match is None or match[1] not in kinds or (match[1] in OF_STAGES) != (match[3] is None):
            raise ValueError(
                f"{text!r} is not an action. Write one of {', '.join(kinds)} followed by "
                "stage.microbatch, such as F3.1, or R, G or D followed by the stage alone, such as R3"
            )
        return cls(kinds[match[1]], int(match[2]), None if match[3] is None else int(match[3]))


class Channel(NamedTuple):
    """One-way connection between two ranks on which messages keep their order.

    At p = 2 with interleaving, both ranks send to each other in both directions: four channels.
    """

    source: int
    destination: int
    direction: Direction


@dataclass(frozen=True)
class Schedule(Stages):
    """One step of a pipeline: a program for each of the p ranks.

    A program is a tuple of actions, communication included.

    Attributes:
        name: Name for logs.
        pipeline_parallel_size: p.
        virtual_pipeline_size: v, stages per rank.
        num_microbatches: m.
        programs: Actions of each rank, in order.
        placement: Placement of the stages on the ranks (world/axes.py).
    """

    name: str
    pipeline_parallel_size: int
    virtual_pipeline_size: int
    num_microbatches: int
    programs: tuple[tuple[Action, ...], ...]
    placement: StagePlacement = "loop"

    @cached_property
    def _kinds(self) -> frozenset[ActionKind]:
        return frozenset(action.kind for program in self.programs for action in program)

    @property
    def training(self) -> bool:
        """Return True if there are backward passes."""
        return ActionKind.BACKWARD in self._kinds

    @property
    def gathers(self) -> bool:
        """Return True if sharded parameters are gathered and freed by actions."""
        return ActionKind.GATHER in self._kinds

    @property
    def splits_backward(self) -> bool:
        """Return True if weight gradients are actions of their own."""
        return ActionKind.WEIGHT in self._kinds

    def channel(self, action: Action) -> Channel:
        """Return the channel that a send or receive action uses."""
        message = TRANSFERS[action.kind]
        source = action.stage if action.kind is message.send else action.stage - message.step
        target = source + message.step
        return Channel(self.rank_of(source), self.rank_of(target), message.direction)

    def text(self) -> str:
        """Return the programs as text, one line per rank."""
        return "\n".join(
            f"rank {rank}  " + " ".join(map(str, program))
            for rank, program in enumerate(self.programs)
        )

    def describe(self) -> str:
        """Return a short form for logs: ``interleaved_1f1b p4 v2 m8``."""
        return (
            f"{self.name} p{self.pipeline_parallel_size} v{self.virtual_pipeline_size} "
            f"m{self.num_microbatches}"
        )


def in_flight(program: Iterable[Action]) -> Iterator[int]:
    """Yield the number of activations (of one stage each) that a rank holds after each action.

    An activation is held from its forward until its backward, or until its weight gradient if the
    program splits the backward.
    """
    kinds = [action.kind for action in program]
    release = ActionKind.WEIGHT if ActionKind.WEIGHT in kinds else ActionKind.BACKWARD
    return accumulate((kind is ActionKind.FORWARD) - (kind is release) for kind in kinds)


def peak_in_flight(program: Iterable[Action]) -> int:
    """Return the maximum number of activations (of one stage each) that a rank holds at once."""
    return max(in_flight(program), default=0)


def receives_ahead(schedule: Schedule) -> int:
    """Return the maximum number of open receives of one channel on any rank; at least 1.

    A receive is open from its post until the computation that takes its message.
    """
    receives = {message.receive: kind for kind, message in MESSAGES.items()}
    peak = 1
    for program in schedule.programs:
        channels: dict[tuple[ActionKind, int, int | None], Channel] = {}
        counts: Counter[Channel] = Counter()
        for action in program:
            key = (receives.get(action.kind, action.kind), action.stage, action.microbatch)
            if action.kind in receives:
                channels[key] = schedule.channel(action)
                counts[channels[key]] += 1
                peak = max(peak, counts[channels[key]])
            elif key in channels:
                counts[channels.pop(key)] -= 1
    return peak


# ---- Errors of a faulty schedule, which show the programs near the fault with an arrow -----------


_AROUND = 12
"""Actions that are shown before and after a fault."""


class ScheduleError(PTDPError, ValueError):
    """A schedule that is incomplete, out of order, or would hang.

    The message shows the place with an arrow.

    Attributes:
        reason: The fault, in one line.
        marks: Place of the fault: rank -> position in its program (the program's length is its
            end).
    """

    def __init__(
        self, message: str, *, reason: str = "", marks: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.marks = dict(marks or {})


def schedule_error(schedule: Schedule, marks: Mapping[int, int], reason: str) -> ScheduleError:
    """Return an error that shows the actions around each of ``marks``: rank -> position."""
    lines = []
    for rank, program in enumerate(schedule.programs):
        if len(schedule.programs) > 16 and rank not in marks:
            continue
        center = marks.get(rank, 0)
        start = max(center - _AROUND, 0)
        stop = max(center, _AROUND) + _AROUND
        words = [
            ("--> " if marks.get(rank) == i else "") + str(program[i])
            for i in range(start, min(stop, len(program)))
        ]
        if marks.get(rank) == len(program):
            words.append("--> (end)")
        line = " ".join(["…"] * (start > 0) + words + ["…"] * (stop < len(program)))
        lines.append(f"rank {rank}  {line}")
    message = f"{schedule.describe()}: {reason}\n" + "\n".join(lines)
    return ScheduleError(message, reason=reason, marks=marks)


def why_illegal(schedule: Schedule, action: Action, rank: int) -> str:
    """Return the reason why the placement of stages does not allow ``action`` on ``rank``."""
    last = schedule.num_microbatches - 1
    if action.stage not in range(schedule.num_stages):
        return f"{action} does not exist: stages are 0 to {schedule.num_stages - 1}"
    if schedule.rank_of(action.stage) != rank:
        return (
            f"{action} is on rank {rank}, but stage {action.stage} is on rank "
            f"{schedule.rank_of(action.stage)}"
        )
    if (action.kind in OF_STAGES) != (action.microbatch is None) or (
        action.microbatch or 0
    ) not in range(last + 1):
        return (
            f"{action} does not exist: microbatches are 0 to {last}, and only R, G and D have none"
        )
    return f"{action} has no peer: the neighbouring stage does not exist or is on the same rank"
