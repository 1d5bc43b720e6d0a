"""Simulation of a schedule: runs the programs of all ranks with costs into a timeline.

A timeline, simulated or measured, holds the start and the end of each computation on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from lightning_ptdp.base.option_types import check_types
from lightning_ptdp.schedule.actions import (
    COMPUTE,
    MESSAGES,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    in_flight,
    peak_in_flight,
)
from lightning_ptdp.schedule.unit_run import WaitingRanks

Number = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """A computation, or a reduction of gradients, with its start and end."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class MemoryCurve:
    """Memory that one rank holds for its backwards, over time.

    Attributes:
        points: (time, held from then on), in order; several points may have the same time.
    """

    points: tuple[tuple[Number, int], ...]

    @property
    def peak(self) -> int:
        """Return the maximum that is held at once."""
        return max((held for _, held in self.points), default=0)


@dataclass(frozen=True)
class Timeline:
    """Start and end of each computation on each rank.

    Attributes:
        schedule: The schedule that was run.
        spans: The computations of each rank; they are in order and do not overlap.
        reductions: The gradient reductions of each rank, which overlap with computations; empty
            if they take no time.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Span, ...], ...] = ()

    @property
    def origin(self) -> Number:
        """Return the start of the first computation."""
        return min((spans[0].start for spans in self.spans if spans), default=0)

    @property
    def step_time(self) -> Number:
        """Return the time from the first start to the last end, including reductions."""
        ends = [span.end for spans in (*self.spans, *self.reductions) for span in spans]
        return max(ends, default=0) - self.origin

    @property
    def busy(self) -> tuple[Number, ...]:
        """Return the time for which each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> Number:
        """Return the time without a computation over the computing time, summed over ranks.

        This is the papers' bubble time over ideal time if all stages cost the same. With unequal
        stages it also counts waiting for slower stages. With reductions it also counts those that
        outlast the computations. It is 0 for no bubble and may exceed 1. Integer and fractional
        costs give an exact ``Fraction``.
        """
        busy = sum(self.busy)
        idle = self.step_time * len(self.spans) - busy
        if not busy:
            return 0
        if isinstance(idle, float) or isinstance(busy, float):
            return idle / busy
        return Fraction(idle) / Fraction(busy)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Return the maximum number of activations that each rank holds at once.

        An activation is one microbatch through one stage.
        """
        return tuple(peak_in_flight(span.action for span in spans) for spans in self.spans)

    def memory(self) -> tuple[MemoryCurve, ...]:
        """Return the number of activations that each rank holds, over time.

        An activation is one microbatch through one stage. It is held from the start of its forward
        to the end of its backward, or of its weight gradient if that is an action of its own.
        """
        return tuple(map(_curve, self.spans))

    def text(self) -> str:
        """Return the timeline in characters: one line per rank.

        A column is the shortest duration. ``=`` marks the continuation of an action. Durations that
        are not multiples of the shortest are rounded. Reductions are left out.
        """
        all_spans = [span for spans in self.spans for span in spans]
        unit = min(
            (span.end - span.start for span in all_spans if span.end > span.start), default=1
        )
        width = max((len(str(span.action)) for span in all_spans), default=1)
        columns = [""] * len(self.spans)
        for rank, spans in enumerate(self.spans):
            cells = [""] * round(self.step_time / unit)
            for span in spans:
                start = round((span.start - self.origin) / unit)
                end = round((span.end - self.origin) / unit)
                cells[start:end] = [str(span.action), *["=" * width] * (end - start - 1)][
                    : end - start
                ]
            columns[rank] = (
                f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells)
            ).rstrip()
        return "\n".join(columns)


def _curve(spans: tuple[Span, ...]) -> MemoryCurve:
    times = (span.start if span.action.kind is ActionKind.FORWARD else span.end for span in spans)
    return MemoryCurve(tuple(zip(times, in_flight(span.action for span in spans), strict=True)))


# ---- Simulation ----------------------------------------------------------------------------------


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
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    reductions: list[list[Span]] = [[] for _ in schedule.programs]
    traffic.ranks.run(
        [
            _run(program, costs, stage_costs, traffic, spans[rank], reductions[rank])
            for rank, program in enumerate(schedule.programs)
        ]
    )
    if waiting := traffic.ranks.waiting:
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
    ranks: WaitingRanks = field(default_factory=WaitingRanks)


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
    gathered_at: dict[int, Number] = {}
    for action in program:
        kind = action.kind
        if kind in COMPUTE:
            start = max(clock, gathered_at.get(action.stage, 0))
            if message := MESSAGES.get(kind):
                receive = Action(message.receive, action.stage, action.microbatch)
                if receive in traffic.posted:
                    send = Action(message.send, action.stage - message.step, action.microbatch)
                    if send not in traffic.sent:
                        yield send
                    departed = max(traffic.sent[send], traffic.posted[receive])
                    start = max(start, departed + costs.latency)
            clock = start + stage_costs[kind][action.stage]
            spans.append(Span(action, start, clock))
        elif kind is ActionKind.GATHER:
            gathered = max(clock, gathered) + stage_costs[kind][action.stage]
            gathered_at[action.stage] = gathered
        elif message := TRANSFERS.get(kind):
            if kind is message.receive:
                traffic.posted[action] = clock
                continue
            clock += costs.send
            traffic.sent[action] = clock
            traffic.ranks.notify(action)
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
