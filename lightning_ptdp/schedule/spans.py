"""A timeline, simulated or measured: when each rank computed what, and the numbers and curves that
follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule, in_flight, peak_in_flight

__all__ = ["MemoryCurve", "Number", "Span", "Timeline"]

Number = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """A computation, or a reduction of gradients, and when it ran."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class MemoryCurve:
    """Memory that one rank holds for its backwards, over time.

    Attributes:
        points: (time, held from then on), in order; there may be several of one time.
    """

    points: tuple[tuple[Number, int], ...]

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return max((held for _, held in self.points), default=0)


@dataclass(frozen=True)
class Timeline:
    """When each rank computed what.

    Attributes:
        schedule: What was run.
        spans: The computations of each rank; they are in order and do not overlap.
        reductions: The reductions of gradients of each rank, which run beside the computations;
            empty where they take no time.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Span, ...], ...] = ()

    @property
    def origin(self) -> Number:
        """The first start."""
        return min((spans[0].start for spans in self.spans if spans), default=0)

    @property
    def step_time(self) -> Number:
        """From the first start to the last end, that of a reduction included."""
        ends = [span.end for spans in (*self.spans, *self.reductions) for span in spans]
        return max(ends, default=0) - self.origin

    @property
    def busy(self) -> tuple[Number, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> Number:
        """Time without a computation over computing time, summed over ranks: the papers' bubble
        time over ideal time where stages cost the same.

        With unequal stages it counts the waiting for slower stages too, and with reductions those
        that outlast the computations. It is 0 for no bubble and may exceed 1. Integer and
        fractional costs give an exact ``Fraction``."""
        busy = sum(self.busy)
        idle = self.step_time * len(self.spans) - busy
        if not busy:
            return 0
        return (
            idle / busy
            if isinstance(idle, float) or isinstance(busy, float)
            else Fraction(idle) / Fraction(busy)
        )

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations (one microbatch through one stage each) that each rank holds at
        once."""
        return tuple(peak_in_flight(span.action for span in spans) for spans in self.spans)

    def memory(self) -> tuple[MemoryCurve, ...]:
        """The activations (one microbatch through one stage each) that each rank holds over time:
        one from the start of its forward to the end of its backward, or of its weight gradient
        where that is an action of its own."""
        return tuple(map(_curve, self.spans))

    def text(self) -> str:
        """The timeline in characters: one line a rank, one column for the shortest duration, ``=``
        while an action goes on.

        Durations that are not multiples of the shortest are rounded; reductions are left out.
        """
        every = [span for spans in self.spans for span in spans]
        unit = min((span.end - span.start for span in every if span.end > span.start), default=1)
        width = max((len(str(span.action)) for span in every), default=1)
        columns = [""] * len(self.spans)
        for rank, spans in enumerate(self.spans):
            cells = [""] * round(self.step_time / unit)
            for span in spans:
                start, end = (
                    round((span.start - self.origin) / unit),
                    round((span.end - self.origin) / unit),
                )
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
