"""How long a schedule takes: the programs of all ranks walked with costs, giving a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_ptdp.pipeline.actions import Action, ActionKind, Schedule, peak_in_flight
from lightning_ptdp.pipeline.verify import ScheduleError

__all__ = ["Costs", "Number", "Span", "Timeline", "simulate"]

Number = int | float | Fraction

_COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations, in seconds or any other unit; integers and fractions give exact results.

    Attributes:
        forward: One microbatch through one stage: a number for all stages, or one a stage.
        backward: The same for a backward action (the input gradient alone where the schedule splits the backward).
        weight: The same for a weight gradient; used only where the schedule splits the backward.
        latency: From when a message is both sent and posted until it is there. It does not occupy either rank.

    Raises:
        ValueError: A cost is negative.
    """

    forward: Number | Sequence[Number] = 1
    backward: Number | Sequence[Number] = 2
    weight: Number | Sequence[Number] = 1
    latency: Number = 0

    def __post_init__(self) -> None:
        for field in ("forward", "backward", "weight", "latency"):
            value = getattr(self, field)
            values = value if isinstance(value, Sequence) else [value]
            if not all(v >= 0 for v in values):
                raise ValueError(f"{field}={value!r} must not be negative")

    def by_stage(self, num_stages: int) -> dict[ActionKind, tuple[Number, ...]]:
        """The cost of each kind of computation on each stage.

        Raises:
            ValueError: There is not one cost a stage.
        """
        costs: dict[ActionKind, tuple[Number, ...]] = {}
        for kind, field in zip(_COMPUTE, ("forward", "backward", "weight"), strict=True):
            value = getattr(self, field)
            values = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
            if len(values) != num_stages:
                raise ValueError(f"{field} has {len(values)} costs for {num_stages} stages: give one number, or one a stage")
            costs[kind] = values
        return costs


@dataclass(frozen=True, slots=True)
class Span:
    """A computation and when it ran."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """When each rank computed what; spans of a rank are in order and do not overlap."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> Number:
        """From the first start to the last end."""
        starts = [spans[0].start for spans in self.spans if spans]
        ends = [spans[-1].end for spans in self.spans if spans]
        return max(ends, default=0) - min(starts, default=0)

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> Number:
        """Idle time over computing time, summed over ranks: the papers' bubble time over ideal time where stages cost the same.

        With unequal stages it counts the waiting for slower stages too. It is 0 for no bubble and may exceed 1. Integer and
        fractional costs give an exact ``Fraction``.
        """
        busy = sum(self.busy)
        idle = self.step_time * len(self.spans) - busy
        if not busy:
            return 0
        return idle / busy if isinstance(idle, float) or isinstance(busy, float) else Fraction(idle) / Fraction(busy)

    @property
    def idle_fraction(self) -> float:
        """Part of the step in which a rank has nothing to do, averaged over ranks: between 0 and 1."""
        bubble = float(self.bubble_fraction)
        return bubble / (1 + bubble)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations (one microbatch through one stage each) that each rank holds at once."""
        return tuple(peak_in_flight(span.action for span in spans) for spans in self.spans)

    def text(self) -> str:
        """The timeline in characters: one line a rank, one column for the shortest duration, ``=`` while an action goes on.

        Durations that are not multiples of the shortest are rounded.
        """
        every = [span for spans in self.spans for span in spans]
        unit = min((span.end - span.start for span in every if span.end > span.start), default=1)
        origin = min((span.start for span in every), default=0)
        width = max((len(str(span.action)) for span in every), default=1)
        columns = [""] * len(self.spans)
        for rank, spans in enumerate(self.spans):
            cells = [""] * round(self.step_time / unit)
            for span in spans:
                start, end = round((span.start - origin) / unit), round((span.end - origin) / unit)
                cells[start:end] = [str(span.action), *["=" * width] * (end - start - 1)][: end - start]
            columns[rank] = (f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells)).rstrip()
        return "\n".join(columns)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on paper. Sends and receives take no time of a rank; a computation waits for its message.

    Args:
        schedule: The schedule.
        costs: Durations; by default a forward takes 1, a backward 2, a message 0.

    Raises:
        ScheduleError: The schedule does not run to its end (``verify_schedule`` says why).
        ValueError: ``costs`` has not one cost a stage.
    """
    walk = _Walk(schedule, costs or Costs())
    ready = list(range(len(schedule.programs)))
    waiting: dict[Action, int] = {}
    while ready:
        rank = ready.pop()
        missing = walk.advance(rank)
        if missing is not None:
            waiting[missing] = rank
        # Whoever waited for a message that is on its way now goes on; each send wakes at most one rank.
        ready += [waiting.pop(send) for send in walk.newly_sent if send in waiting]
        walk.newly_sent.clear()
    if waiting:
        stuck = ", ".join(f"rank {rank} waits for {send}" for send, rank in waiting.items())
        raise ScheduleError(f"{schedule.describe()} does not run to its end: {stuck}")
    return Timeline(schedule, tuple(tuple(spans) for spans in walk.spans))


class _Walk:
    """How far each rank has come, and the messages in between."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ranks = range(len(schedule.programs))
        self._schedule = schedule
        self._costs = costs.by_stage(schedule.num_stages)
        self._latency = costs.latency
        self._clock: list[Number] = [0 for _ in ranks]
        self._position = [0 for _ in ranks]
        self._posted: dict[Action, Number] = {}
        self._sent: dict[Action, Number] = {}
        self.newly_sent: list[Action] = []
        self.spans: list[list[Span]] = [[] for _ in ranks]

    def advance(self, rank: int) -> Action | None:
        """Run ``rank`` until its end (``None``) or until it waits for a send that has not happened (returned)."""
        program = self._schedule.programs[rank]
        for position in range(self._position[rank], len(program)):
            action = program[position]
            self._position[rank] = position
            if action.kind in _COMPUTE:
                missing = self._compute(rank, action)
                if missing is not None:
                    return missing
            elif action.kind in _SENDS:
                self._sent[action] = self._clock[rank]
                self.newly_sent.append(action)
            elif action.kind in _RECEIVES:
                self._posted[action] = self._clock[rank]
        self._position[rank] = len(program)
        return None

    def _compute(self, rank: int, action: Action) -> Action | None:
        start = self._clock[rank]
        message = _message_of(action)
        if message is not None and message[0] in self._posted:
            receive, send = message
            if send not in self._sent:
                return send
            start = max(start, max(self._sent[send], self._posted[receive]) + self._latency)
        end = start + self._costs[action.kind][action.stage]
        self.spans[rank].append(Span(action, start, end))
        self._clock[rank] = end
        return None


def _message_of(action: Action) -> tuple[Action, Action] | None:
    """The receive that a computation uses, if it was posted, and the send at the other end."""
    if action.kind is ActionKind.FORWARD:
        return (
            Action(ActionKind.RECEIVE_FORWARD, action.stage, action.microbatch),
            Action(ActionKind.SEND_FORWARD, action.stage - 1, action.microbatch),
        )
    if action.kind is ActionKind.BACKWARD:
        return (
            Action(ActionKind.RECEIVE_BACKWARD, action.stage, action.microbatch),
            Action(ActionKind.SEND_BACKWARD, action.stage + 1, action.microbatch),
        )
    return None
