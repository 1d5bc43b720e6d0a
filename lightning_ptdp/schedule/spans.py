"""A timeline, simulated or measured: when each rank computed what, and the numbers and curves that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_ptdp.schedule.actions import Action, ActionKind, Schedule, peak_in_flight

__all__ = ["MemoryCurve", "Number", "Span", "Timeline", "by_stage"]

Number = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """A computation, or a reduction of gradients, and when it ran."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank holds for its backwards, over time.

    Attributes:
        points: (time, held from then on), in order; there may be several of one time.
    """

    points: tuple[tuple[Number, Number], ...]

    @property
    def peak(self) -> Number:
        """The most that is held at once."""
        return max((held for _, held in self.points), default=0)


@dataclass(frozen=True)
class Timeline:
    """When each rank computed what.

    Attributes:
        schedule: What was run.
        spans: The computations of each rank; they are in order and do not overlap.
        reductions: The reductions of gradients of each rank, which run beside the computations; empty where they take no time.
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
        """Time without a computation over computing time, summed over ranks: the papers' bubble time over ideal time where
        stages cost the same.

        With unequal stages it counts the waiting for slower stages too, and with reductions those that outlast the computations.
        It is 0 for no bubble and may exceed 1. Integer and fractional costs give an exact ``Fraction``.
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

    def memory(
        self, *, activation_bytes: Number | tuple[Number, ...] = 1, freed_by_backward: Number = 0
    ) -> tuple[MemoryCurve, ...]:
        """What each rank holds over time: an activation from the start of its forward to the end of its backward, or of its weight
        gradient where that is an action of its own.

        Args:
            activation_bytes: Size of what one microbatch leaves in one stage: a number for all stages, or one a stage.
            freed_by_backward: The share of it, 0 to 1, that an input gradient frees already; the weight gradient frees the rest.

        Raises:
            ValueError: There is not one size a stage, or the share is not between 0 and 1.
        """
        sizes = by_stage("activation_bytes", activation_bytes, self.schedule.num_stages, "sizes")
        if not 0 <= freed_by_backward <= 1:
            raise ValueError(f"freed_by_backward={freed_by_backward!r} must be between 0 and 1")
        return tuple(_curve(spans, sizes, freed_by_backward) for spans in self.spans)

    def text(self) -> str:
        """The timeline in characters: one line a rank, one column for the shortest duration, ``=`` while an action goes on.

        Durations that are not multiples of the shortest are rounded; reductions are left out.
        """
        every = [span for spans in self.spans for span in spans]
        unit = min((span.end - span.start for span in every if span.end > span.start), default=1)
        width = max((len(str(span.action)) for span in every), default=1)
        columns = [""] * len(self.spans)
        for rank, spans in enumerate(self.spans):
            cells = [""] * round(self.step_time / unit)
            for span in spans:
                start, end = round((span.start - self.origin) / unit), round((span.end - self.origin) / unit)
                cells[start:end] = [str(span.action), *["=" * width] * (end - start - 1)][: end - start]
            columns[rank] = (f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells)).rstrip()
        return "\n".join(columns)


def by_stage(name: str, value: Number | Sequence[Number], num_stages: int, what: str) -> tuple[Number, ...]:
    """``value`` for each stage.

    Raises:
        ValueError: There is not one a stage; ``name`` and ``what`` are for the message.
    """
    values = tuple(value) if isinstance(value, Sequence) else (value,) * num_stages
    if len(values) != num_stages:
        raise ValueError(f"{name} has {len(values)} {what} for {num_stages} stages: give one number, or one a stage")
    return values


def _curve(spans: tuple[Span, ...], sizes: tuple[Number, ...], freed: Number) -> MemoryCurve:
    split = {(span.action.stage, span.action.microbatch) for span in spans if span.action.kind is ActionKind.WEIGHT}
    held: Number = 0
    points: list[tuple[Number, Number]] = []
    for span in spans:
        action, size = span.action, sizes[span.action.stage]
        if action.kind is ActionKind.FORWARD:
            held += size
        elif action.kind is ActionKind.WEIGHT:
            held -= size * (1 - freed)
        else:
            held -= size * freed if (action.stage, action.microbatch) in split else size
        points.append((span.start if action.kind is ActionKind.FORWARD else span.end, held))
    return MemoryCurve(tuple(points))
