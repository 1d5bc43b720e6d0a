"""Simulation of a schedule: runs the programs of all ranks with costs into a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptdp.base.option_types import check_types
from lightning_ptdp.schedule.actions import (
    COMPUTE,
    MESSAGES,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
)
from lightning_ptdp.schedule.spans import Number, Span, Timeline

_SENDS = tuple(message.send for message in MESSAGES.values())
_RECEIVES = tuple(message.receive for message in MESSAGES.values())
_TIMED = (*COMPUTE, ActionKind.REDUCE, ActionKind.GATHER)
_FIELDS = {kind: kind.name.lower() for kind in _TIMED}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations, in seconds or any other unit; integers and fractions give exact results.

    Attributes:
        forward: One microbatch through one stage: one number for all stages, or one number per
            stage.
        backward: The same for a backward action (only the input gradient if the schedule splits the
            backward).
        weight: The same for a weight gradient; used only if the schedule splits the backward.
        reduce: The reduction of a stage's gradients over the replicas. It starts at its action and
            overlaps with computations. The reductions of one rank run one after the other.
        gather: The same for the gather of a stage's sharded parameters, for which its computations
            wait.
        send: Time for which a send occupies its rank. Only messages between ranks are sent.
        latency: Time from the moment when a message is both sent and posted until it arrives. It
            does not occupy either rank.

    Raises:
        ValueError: A cost is negative.
    """

    forward: Number | Sequence[Number] = 1
    backward: Number | Sequence[Number] = 2
    weight: Number | Sequence[Number] = 1
    reduce: Number | Sequence[Number] = 0
    gather: Number | Sequence[Number] = 0
    send: Number = 0
    latency: Number = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name in (*_FIELDS.values(), "send", "latency"):
            value = getattr(self, name)
            if not all(v >= 0 for v in (value if isinstance(value, Sequence) else [value])):
                raise ValueError(f"{name}={value!r} must not be negative")

    def by_stage(self, num_stages: int) -> dict[ActionKind, tuple[Number, ...]]:
        """Return the cost of each kind of computation, and of the reduction, on each stage.

        Raises:
            ValueError: There is not one cost per stage.
        """
        costs: dict[ActionKind, tuple[Number, ...]] = {}
        for kind, name in _FIELDS.items():
            value = getattr(self, name)
            costs[kind] = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
            if len(costs[kind]) != num_stages:
                raise ValueError(
                    f"{name} has {len(costs[kind])} costs for {num_stages} stages. Give one "
                    "number for all stages, or one per stage"
                )
        return costs


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule.

    Receives take no time of a rank. A computation waits for its message.

    Args:
        schedule: The schedule.
        costs: Durations; by default a forward takes 1, a backward 2, messages and reductions 0.

    Raises:
        ScheduleError: The schedule does not run to its end (``verify_schedule`` finds the reason).
        ValueError: ``costs`` does not have one cost per stage.
    """
    costs = costs or Costs()
    stage_costs = costs.by_stage(schedule.num_stages)
    traffic = _Traffic()
    waiting = dict[Action, int]()
    ready = list(range(len(schedule.programs)))
    spans: list[list[Span]] = [[] for _ in ready]
    reductions: list[list[Span]] = [[] for _ in ready]
    runs = [
        _run(program, costs, stage_costs, traffic, spans[rank], reductions[rank])
        for rank, program in enumerate(schedule.programs)
    ]
    while ready:
        rank = ready.pop()
        missing = next(runs[rank], None)
        if missing is not None:
            waiting[missing] = rank
        # Resume the ranks that waited for a message that has now been sent. Each send wakes at most
        # one rank.
        ready += [waiting.pop(send) for send in traffic.newly_sent if send in waiting]
        traffic.newly_sent.clear()
    if waiting:
        stuck = ", ".join(f"rank {rank} waits for {send}" for send, rank in waiting.items())
        raise ScheduleError(f"{schedule.describe()} does not run to its end: {stuck}")
    return Timeline(
        schedule, tuple(map(tuple, spans)), tuple(map(tuple, reductions)) if any(reductions) else ()
    )


@dataclass(frozen=True)
class _Traffic:
    """The messages between all ranks: post time of each receive, end time of each send."""

    posted: dict[Action, Number] = field(default_factory=dict)
    sent: dict[Action, Number] = field(default_factory=dict)
    newly_sent: list[Action] = field(default_factory=list)


def _run(
    program: Iterable[Action],
    costs: Costs,
    stage_costs: Mapping[ActionKind, Sequence[Number]],
    traffic: _Traffic,
    spans: list[Span],
    reductions: list[Span],
) -> Iterator[Action]:
    """Run one rank; yield each send that it must wait for."""
    clock: Number = 0
    gathered: Number = 0
    whole: dict[int, Number] = {}
    for action in program:
        kind = action.kind
        if kind in COMPUTE:
            start = max(clock, whole.get(action.stage, 0))
            if kind in MESSAGES:
                receive = Action(MESSAGES[kind].receive, action.stage, action.microbatch)
                if receive in traffic.posted:
                    send = Action(
                        MESSAGES[kind].send, action.stage - MESSAGES[kind].step, action.microbatch
                    )
                    if send not in traffic.sent:
                        yield send
                    start = max(
                        start, max(traffic.sent[send], traffic.posted[receive]) + costs.latency
                    )
            clock = start + stage_costs[kind][action.stage]
            spans.append(Span(action, start, clock))
        elif kind in _SENDS:
            clock += costs.send
            traffic.sent[action] = clock
            traffic.newly_sent.append(action)
        elif kind is ActionKind.GATHER:
            gathered = max(clock, gathered) + stage_costs[kind][action.stage]
            whole[action.stage] = gathered
        elif kind in _RECEIVES:
            traffic.posted[action] = clock
        elif kind is ActionKind.REDUCE and (cost := stage_costs[kind][action.stage]):
            start = max(clock, reductions[-1].end) if reductions else clock
            reductions.append(Span(action, start, start + cost))


def ideal_bubble(schedule: Schedule) -> float:
    """Return bubble time over ideal time (arXiv 2104.04473, section 2.2).

    Stages are equal and messages take no time. A backward takes twice a forward.
    """
    return float(
        simulate(schedule, Costs(backward=1 if schedule.splits_backward else 2)).bubble_fraction
    )
