"""Comparison of a layout's record with that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.verification.record import Held, Record, StepRecord

__all__ = ["KINDS", "Difference", "compare"]

KINDS = (
    "batch",
    "initial value",
    "optimizer option",
    "random numbers",
    "loss",
    "gradient",
    "weight",
    "buffer",
    "logged value",
    "metric",
)
"""In the order of a step."""
_NOISE = 8
"""A value may be so many times further from one process than float64 is."""
_FLOOR = 1e-3
"""A tensor is compared with its own size, but at least with this part of the model's."""


@dataclass(frozen=True)
class Difference:
    """One compared value.

    Attributes:
        kind: One of ``KINDS``.
        step: From 0; -1 before the first.
        name: Parameter, buffer, metric or option.
        error: Relative.
        tolerance: Largest error of equal values.
        point: Hook behind which a gradient is compared.
        place: Rank and its coordinates.
        text: Both values, where they are numbers.
        order: Of points within a step.
    """

    kind: str
    step: int
    name: str
    error: float
    tolerance: float = 0.0
    point: str = ""
    place: str = ""
    text: str = ""
    order: int = 0

    @property
    def differs(self) -> bool:
        """Return True if the error is more than rounding."""
        return not self.error <= self.tolerance

    @property
    def key(self) -> tuple[object, ...]:
        """Return what identifies the compared value on every rank."""
        return self.kind, self.step, self.name, self.point

    def __str__(self) -> str:
        when = "before step 0" if self.step < 0 else f"step {self.step}"
        named = f" '{self.name}'" if self.name else ""
        point = f" after {self.point}" if self.point else ""
        where = f" on {self.place}" if self.place else ""
        size = f" ({self.error:.1e} off, tolerance {self.tolerance:.0e})" if self.tolerance and self.error < math.inf else ""
        return f"{when}: {self.kind}{named}{point}{where} {self.text or 'differs'}{size}"


def compare(found: Sequence[Record], expected: Record, eps: float, noise: Sequence[Difference] = ()) -> list[Difference]:
    """Return everything that was compared, in the order of the training, the largest difference of equal ones first.

    Args:
        found: Of the layout's ranks.
        expected: Of one process.
        eps: Machine epsilon of the dtype.
        noise: The same comparison of one process in float64 with one process; enlarges the tolerances.
    """
    measured: dict[tuple[object, ...], float] = {}
    for one in noise:
        measured[one.key] = max(measured.get(one.key, 0.0), one.error)
    compared = [
        replace(one, tolerance=max(one.tolerance, _NOISE * measured.get(one.key, 0.0))) if one.tolerance else one
        for one in _Comparison(found, expected, eps).run()
    ]
    return sorted(compared, key=lambda one: (one.step, KINDS.index(one.kind), one.order, -one.error / (one.tolerance or 1)))


class _Comparison:
    """Tolerances, all relative, are those that another order of sums explains. Values are losses and logged values; gradients and buffers
    are compared by norm; so is the way that a weight went, but optimizers such as Adam divide a gradient by itself, and so its rounding.
    """

    def __init__(self, found: Sequence[Record], expected: Record, eps: float) -> None:
        self._found, self._expected = found, expected
        eps = max(eps, 1e-8)  # modules in float64 often compute parts in float32
        self._value_tolerance, self._tolerance = min(128 * eps, 0.05), min(1024 * eps, 0.5)
        self._weight_tolerance = min(3 * math.sqrt(eps), 0.5)
        self._significant: dict[str, Tensor] = {}

    def run(self) -> Iterator[Difference]:
        found, expected = self._found, self._expected
        yield from self._peers()
        for part in ("weights", "buffers"):
            start = [getattr(rank.start, part) for rank in found]
            yield from self._tensors("initial value", -1, start, getattr(expected.start, part), 0.0)
        yield from self._options()
        counts = {len(rank.steps) for rank in (*found, expected)}
        if len(counts) > 1:
            yield Difference("loss", min(counts), "", math.inf, text="is that of another number of steps")
        for index in range(min(counts)):
            yield from self._step(index, [rank.steps[index] for rank in found], expected.steps[index])
        yield from self._numbers("metric", max(counts), [(rank.final, 1.0) for rank in found], expected.final)

    def _peers(self) -> Iterator[Difference]:
        """Ranks that read the same samples read the same batches, and draw the same numbers in the step of one microbatch."""
        first: dict[tuple[object, ...], tuple[Record, str]] = {}
        for rank in self._found:
            read: dict[tuple[Any, ...], str] = {("batch", "", index): value for index, value in enumerate(rank.read)}
            for (batch, generator), state in rank.seen.draws.items():
                read["random numbers", generator, batch] = state
            for key, value in read.items():
                other, others = first.setdefault((rank.peers, *key), (rank, value))
                if value != others:
                    text = f"not those of rank {other.rank} for the same samples"
                    yield Difference(key[0], 0, key[1], math.inf, place=rank.place, text=text)

    def _options(self) -> Iterator[Difference]:
        trained: set[str] = set()
        for rank in self._found:
            trained |= rank.options.keys()
            for name, options in rank.options.items():
                expected = self._expected.options.get(name, {})
                wrong = [key for key, value in options.items() if value != expected.get(key, value)]
                text = ", ".join(f"{key}={options[key]!r} instead of {expected[key]!r}" for key in wrong)
                error = math.inf if wrong or not expected else 0.0
                yield Difference("optimizer option", -1, name, error, place=rank.place, text=text)
        for name in sorted(self._expected.options.keys() - trained):
            yield Difference("optimizer option", -1, name, math.inf, text="is in no rank's optimizer")

    def _step(self, index: int, found: Sequence[StepRecord], expected: StepRecord) -> Iterator[Difference]:
        yield self._value("loss", index, "", _mean_loss(found), _mean_loss([expected]))
        tolerance = self._tolerance
        gradients: Mapping[str, Held] = {}
        for order, (point, gradients) in enumerate(expected.gradients.items()):
            ranks = [step.gradients.get(point, {}) for step in found]
            floor = _FLOOR * _rms(gradients)
            yield from self._tensors("gradient", index, ranks, gradients, tolerance, floor=floor, point=point, order=order)
        self._mark(gradients)
        ways = self._ways(expected.weights)
        ranks = [self._ways(step.weights) for step in found]
        yield from self._tensors("weight", index, ranks, ways, self._weight_tolerance, floor=_FLOOR * _rms(ways))
        yield from self._tensors("buffer", index, [step.buffers for step in found], expected.buffers, tolerance)
        logged = [(step.logged, step.losses[-1][1] if step.losses else 1.0) for step in found]
        yield from self._numbers("logged value", index, logged, expected.logged)

    def _mark(self, gradients: Mapping[str, Held]) -> None:
        """An element whose gradient is rounding is divided by itself by some optimizers: it is not compared from here on."""
        part = min(10 * self._tolerance, 0.01)
        for name, held in gradients.items():
            counts = held[0][1].abs() >= part * max(_rms({"": held}), _FLOOR * _rms(gradients))
            self._significant[name] = self._significant.get(name, torch.ones_like(counts)) & counts

    def _ways(self, weights: Mapping[str, Held]) -> dict[str, Held]:
        """Return how far significant elements went since the start."""
        start = self._expected.start.weights
        return {
            name: [
                (offset, (value.double() - _cut(start[name][0][1], offset, value)) * _cut(self._significant[name], offset, value))
                for offset, value in held
            ]
            for name, held in weights.items()
            if name in start and name in self._significant
        }

    def _tensors(
        self,
        kind: str,
        step: int,
        found: Sequence[Mapping[str, Held]],
        expected: Mapping[str, Held],
        tolerance: float,
        *,
        floor: float = 0.0,
        **more: Any,
    ) -> Iterator[Difference]:
        known: set[str] = set()
        for rank, tensors in zip(self._found, found, strict=True):
            known |= tensors.keys()
            for name, held in tensors.items():
                error = _error(held, expected.get(name, ()), floor)
                yield Difference(kind, step, name, error, tolerance, place=rank.place, **more)
        for name in expected.keys() - known:
            if any(bool(value.any()) for _, value in expected[name]):
                yield Difference(kind, step, name, math.inf, text="is on no rank", **more)

    def _numbers(
        self, kind: str, step: int, found: Sequence[tuple[Mapping[str, float], float]], expected: Mapping[str, float]
    ) -> Iterator[Difference]:
        """Compare the mean over the replicas: a value that is logged without sync_dist=True is each replica's own."""
        for name in sorted({*expected, *(name for values, _ in found for name in values)}):
            own = [(values[name], weight) for values, weight in found if name in values]
            if not own or name not in expected:
                text = "is logged, but not in one process" if own else "is not logged"
                yield Difference(kind, step, name, math.inf, text=text)
                continue
            local, total = len({value for value, _ in own}) > 1, sum(weight for _, weight in own)
            weighted = len({weight for _, weight in own}) > 1
            if local and self._expected.counted and not weighted:
                continue  # means over unknown numbers of tokens
            mean = sum(value * weight for value, weight in own) / total if local and total else own[0][0]
            yield self._value(kind, step, name, mean, expected[name])

    def _value(self, kind: str, step: int, name: str, found: float, expected: float) -> Difference:
        same = found == expected or (math.isnan(found) and math.isnan(expected))
        error = 0.0 if same else abs(found - expected) / max(abs(expected), 1e-3)
        text = "" if same else f"is {found:.8g} instead of {expected:.8g}"
        return Difference(kind, step, name, error, self._value_tolerance, text=text)


def _mean_loss(ranks: Sequence[StepRecord]) -> float:
    pairs = [pair for step in ranks for pair in step.losses if pair[1]]
    weight = sum(tokens for _, tokens in pairs)
    return sum(loss * tokens for loss, tokens in pairs) / weight if weight else math.nan


def _rms(tensors: Mapping[str, Held]) -> float:
    parts = [value.double() for held in tensors.values() for _, value in held]
    return math.sqrt(sum(float(part.square().sum()) for part in parts) / max(sum(part.numel() for part in parts), 1))


def _cut(whole: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))]


def _error(held: Held, expected: Sequence[tuple[tuple[int, ...], Tensor]], floor: float) -> float:
    """Relative norm of the difference; of what is expected at least ``floor`` an element counts."""
    off = size = count = 0.0
    for offset, value in held:
        other = _cut(expected[0][1], offset, value).double() if expected else torch.zeros_like(value, dtype=torch.float64)
        same = (value == other) | (value.isnan() & other.isnan())
        off += float((value.double() - other).masked_fill(same, 0.0).square().sum())
        size += float(other.masked_fill(same & other.isnan(), 0.0).square().sum())
        count += value.numel()
    return math.sqrt(off) / max(math.sqrt(size), floor * math.sqrt(count), 1e-300) if off else 0.0
