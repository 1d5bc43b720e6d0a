"""Timelines, simulated or measured: their numbers, curves and traces.

A timeline holds the start and the end of each computation on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule, in_flight, peak_in_flight

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


# ---- Export of timelines as a trace for https://ui.perfetto.dev or chrome://tracing --------------


KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradient",
    ActionKind.REDUCE: "gradient reduction",
}


def chrome_trace(*timelines: Timeline, titles: Sequence[str] = ()) -> dict[str, Any]:
    """Return timelines in the Trace Event Format, to be written as JSON.

    Times are interpreted as seconds. Every timeline is a process of the trace and every rank a
    thread. A rank with reductions has a second thread. The activations that a rank holds are a
    counter.

    Args:
        timelines: Simulated or measured timelines.
        titles: Names of the processes; by default the schedules.
    """
    titles = titles or [timeline.schedule.describe() for timeline in timelines]
    events = [
        event
        for pid, timeline in enumerate(timelines)
        for event in _events(timeline, pid, titles[pid])
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline, pid: int, title: str) -> Iterator[dict[str, Any]]:
    yield _name("process_name", title, pid)
    for rank, spans in enumerate(timeline.spans):
        yield _name("thread_name", f"pipeline rank {rank}", pid, tid=2 * rank)
        yield from (_complete(span, pid, 2 * rank) for span in spans)
    for rank, spans in enumerate(timeline.reductions):
        yield _name("thread_name", f"pipeline rank {rank}: reductions", pid, tid=2 * rank + 1)
        yield from (_complete(span, pid, 2 * rank + 1) for span in spans)
    for rank, curve in enumerate(timeline.memory()):
        name = f"activations held by rank {rank}"
        yield from (
            {
                "name": name,
                "ph": "C",
                "ts": float(time) * 1e6,
                "pid": pid,
                "args": {"held": float(held)},
            }
            for time, held in curve.points
        )


def _name(event: str, name: str, pid: int, *, tid: int = 0) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": str(span.action),
        "cat": KIND_NAMES[span.action.kind],
        "ph": "X",
        "ts": float(span.start) * 1e6,
        "dur": float(span.end - span.start) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }
