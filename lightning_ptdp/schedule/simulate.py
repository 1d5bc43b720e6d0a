"""How long a schedule takes: the programs of all ranks walked with costs, giving a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.option_types import check_types
from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule
from lightning_ptdp.schedule.schedule_error import ScheduleError
from lightning_ptdp.schedule.spans import MemoryCurve, Number, Span, Timeline

__all__ = ["Costs", "MemoryCurve", "Number", "Span", "Timeline", "simulate"]

_COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)


_FIELDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight",
    ActionKind.REDUCE: "reduce",
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations, in seconds or any other unit; integers and fractions give exact results.

    Attributes:
        forward: One microbatch through one stage: a number for all stages, or one a stage.
        backward: The same for a backward action (the input gradient alone where the schedule splits the backward).
        weight: The same for a weight gradient; used only where the schedule splits the backward.
        reduce: The reduction of a stage's gradients over the replicas. It starts at its action and runs beside the computations;
            the reductions of one rank run one after the other.
        send: A send occupies its rank for this time. Only messages between ranks are sent.
        latency: From when a message is both sent and posted until it is there. It does not occupy either rank.

    Raises:
        ValueError: A cost is negative.
    """

    forward: Number | Sequence[Number] = 1
    backward: Number | Sequence[Number] = 2
    weight: Number | Sequence[Number] = 1
    reduce: Number | Sequence[Number] = 0
    send: Number = 0
    latency: Number = 0

    def __post_init__(self) -> None:
        check_types(self)
        for field in (*_FIELDS.values(), "send", "latency"):
            value = getattr(self, field)
            values = value if isinstance(value, Sequence) else [value]
            if not all(v >= 0 for v in values):
                raise ValueError(f"{field}={value!r} must not be negative")

    def by_stage(self, num_stages: int) -> dict[ActionKind, tuple[Number, ...]]:
        """The cost of each kind of computation, and of the reduction, on each stage.

        Raises:
            ValueError: There is not one cost a stage.
        """
        costs: dict[ActionKind, tuple[Number, ...]] = {}
        for kind, field in _FIELDS.items():
            value = getattr(self, field)
            values = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
            if len(values) != num_stages:
                raise ValueError(f"{field} has {len(values)} costs for {num_stages} stages: give one number, or one a stage")
            costs[kind] = values
        return costs


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on paper. Receives take no time of a rank; a computation waits for its message.

    Args:
        schedule: The schedule.
        costs: Durations; by default a forward takes 1, a backward 2, messages and reductions 0.

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
    reductions = tuple(tuple(spans) for spans in walk.reductions)
    return Timeline(schedule, tuple(tuple(spans) for spans in walk.spans), reductions if any(reductions) else ())


class _Walk:
    """How far each rank has come, and the messages in between."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        ranks = range(len(schedule.programs))
        self._schedule = schedule
        self._costs = costs.by_stage(schedule.num_stages)
        self._send, self._latency = costs.send, costs.latency
        self._clock: list[Number] = [0 for _ in ranks]
        self._position = [0 for _ in ranks]
        self._posted: dict[Action, Number] = {}
        self._sent: dict[Action, Number] = {}
        self.newly_sent: list[Action] = []
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.reductions: list[list[Span]] = [[] for _ in ranks]

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
                self._clock[rank] += self._send
                self._sent[action] = self._clock[rank]
                self.newly_sent.append(action)
            elif action.kind in _RECEIVES:
                self._posted[action] = self._clock[rank]
            else:
                self._reduce(rank, action)
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

    def _reduce(self, rank: int, action: Action) -> None:
        cost, lane = self._costs[action.kind][action.stage], self.reductions[rank]
        if cost:
            start = max(self._clock[rank], lane[-1].end) if lane else self._clock[rank]
            lane.append(Span(action, start, start + cost))


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
