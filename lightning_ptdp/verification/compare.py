"""Comparison of a layout's record with that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_ptdp.verification.record import Held, Record, StepRecord

__all__ = ["KINDS", "Difference", "Tolerance", "compare"]

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
"""A gradient is compared with its own size, but at least with this part of the model's."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative errors of a dtype: those that another order of sums explains.

    Attributes:
        value: Of losses and logged values.
        gradient: Of gradients and buffers, by norm.
        weight: Of the way that a weight went, by norm; optimizers such as Adam divide a gradient by itself, and so its rounding.
    """

    value: float
    gradient: float
    weight: float

    @classmethod
    def of(cls, eps: float) -> Tolerance:
        """Return the tolerances of a dtype with this machine epsilon; modules in float64 often compute parts in float32."""
        eps = max(eps, 1e-8)
        return cls(value=min(128 * eps, 0.05), gradient=min(1024 * eps, 0.5), weight=min(3 * math.sqrt(eps), 0.5))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One compared value.

    Attributes:
        kind: One of ``KINDS``.
        step: From 0; -1 before the first.
        name: Parameter, buffer, metric or option.
        error: Relative.
        tolerance: Largest error of equal values.
        point: Point of the step, for a gradient.
        place: Rank and its coordinates.
        text: Both values, where they are numbers.
    """

    kind: str
    step: int
    name: str
    error: float
    tolerance: float
    point: str = ""
    place: str = ""
    text: str = ""
    order: int = field(default=0, repr=False)

    @property
    def differs(self) -> bool:
        """Return True if the error is more than rounding."""
        return not self.error <= self.tolerance

    @property
    def key(self) -> tuple[object, ...]:
        """What is compared, whatever the rank."""
        return self.kind, self.step, self.name, self.point

    def __str__(self) -> str:
        when = "before step 0" if self.step < 0 else f"step {self.step}"
        named = f" '{self.name}'" if self.name else ""
        point = f" after {self.point}" if self.point else ""
        where = f" on {self.place}" if self.place else ""
        size = f"{self.error:.1e} off, tolerance {self.tolerance:.0e}" if 0 < self.error < math.inf else "differs"
        return f"{when}: {self.kind}{named}{point}{where}: {self.text + ' ' if self.text else ''}({size})"


def compare(found: Sequence[Record], expected: Record, tolerance: Tolerance, noise: Sequence[Difference] = ()) -> list[Difference]:
    """Return everything that was compared, in the order of the training, the largest difference of equal ones first.

    Args:
        found: Of the layout's ranks.
        expected: Of one process.
        tolerance: Of the dtype.
        noise: The same comparison of one process in float64 with one process; enlarges the tolerances.
    """
    comparison = _Comparison(found, expected, tolerance)
    measured: dict[tuple[object, ...], float] = {}
    for one in noise:
        measured[one.key] = max(measured.get(one.key, 0.0), one.error)
    result = []
    for one in comparison.run():
        allowed = max(one.tolerance, _NOISE * measured.get(one.key, 0.0)) if one.tolerance else 0.0
        result.append(one if allowed == one.tolerance else Difference(**{**vars(one), "tolerance": allowed}))
    return sorted(result, key=lambda one: (one.step, KINDS.index(one.kind), one.order, -one.error / (one.tolerance or 1)))


class _Comparison:
    def __init__(self, found: Sequence[Record], expected: Record, tolerance: Tolerance) -> None:
        self._found, self._expected, self._tolerance = found, expected, tolerance
        self._significant: dict[str, Tensor] = {}

    def run(self) -> Iterator[Difference]:
        yield from self._same_batches()
        yield from self._start()
        yield from self._options()
        yield from self._draws()
        counts = {len(rank.steps) for rank in (*self._found, self._expected)}
        if len(counts) > 1:
            yield Difference(kind="loss", step=min(counts), name="number of steps", error=math.inf, tolerance=0.0)
        for index in range(min(counts)):
            yield from self._step(index)
        weights = [1.0] * len(self._found)
        yield from self._numbers("metric", max(counts), [rank.final for rank in self._found], self._expected.final, weights)

    def _same_batches(self) -> Iterator[Difference]:
        """Ranks of one replica read the same batches."""
        first: dict[str, Record] = {}
        for rank in self._found:
            other = first.setdefault(rank.peers, rank)
            for index, (own, others) in enumerate(zip(rank.read, other.read, strict=False)):
                if own != others:
                    yield Difference(
                        kind="batch", step=index, name="", error=math.inf, tolerance=0.0, place=_place(rank), text=f"not rank {other.rank}'s"
                    )

    def _draws(self) -> Iterator[Difference]:
        """Ranks of one replica draw the same numbers in the step of one microbatch."""
        first: dict[tuple[str, str, str], tuple[Record, str]] = {}
        reported: set[str] = set()
        for rank in self._found:
            for (batch, generator), state in rank.seen.draws.items():
                other, others = first.setdefault((rank.peers, batch, generator), (rank, state))
                if state != others and generator not in reported:
                    reported.add(generator)
                    text = f"drawn in training_step, are not those of rank {other.rank} for the same microbatch"
                    yield Difference(
                        kind="random numbers", step=0, name=generator, error=math.inf, tolerance=0.0, place=_place(rank), text=text
                    )

    def _start(self) -> Iterator[Difference]:
        for rank in self._found:
            for part in ("weights", "buffers"):
                expected = getattr(self._expected.start, part)
                yield from self._missing("initial value", -1, [getattr(each.start, part) for each in self._found], expected)
                for name, held in getattr(rank.start, part).items():
                    equal = name in expected and all(torch.equal(a, b) for a, b in _pairs(held, expected[name]))
                    error = 0.0 if equal else math.inf
                    yield Difference(kind="initial value", step=-1, name=name, error=error, tolerance=0.0, place=_place(rank))

    def _options(self) -> Iterator[Difference]:
        for rank in self._found:
            for name, options in rank.options.items():
                expected = self._expected.options.get(name, {})
                wrong = [key for key in options if key in expected and options[key] != expected[key]]
                text = ", ".join(f"{key}={options[key]!r} instead of {expected[key]!r}" for key in wrong)
                error = math.inf if wrong or not expected else 0.0
                yield Difference(
                    kind="optimizer option", step=-1, name=name, error=error, tolerance=0.0, place=_place(rank), text=text
                )
        missing = self._expected.options.keys() - {name for rank in self._found for name in rank.options}
        for name in sorted(missing):
            yield Difference(
                kind="optimizer option", step=-1, name=name, error=math.inf, tolerance=0.0, text="is in the optimizer of no rank"
            )

    def _step(self, index: int) -> Iterator[Difference]:
        expected, found = self._expected.steps[index], [rank.steps[index] for rank in self._found]
        yield self._value("loss", index, "", _mean_loss(found), _mean_loss([expected]))
        yield from self._gradients(index, found, expected)
        yield from self._weights(index, found, expected)
        for rank, step in zip(self._found, found, strict=True):
            for name, held in step.buffers.items():
                if name in expected.buffers:
                    yield self._tensor("buffer", index, name, rank, held, expected.buffers[name], self._tolerance.gradient)
        weights = [step.losses[-1][1] if step.losses else 1.0 for step in found]
        yield from self._numbers("logged value", index, [step.logged for step in found], expected.logged, weights)

    def _gradients(self, index: int, found: Sequence[StepRecord], expected: StepRecord) -> Iterator[Difference]:
        tolerance = self._tolerance.gradient
        for order, (point, gradients) in enumerate(expected.gradients.items()):
            scale = _FLOOR * _rms(gradients)
            ranks = [step.gradients.get(point, {}) for step in found]
            yield from self._missing("gradient", index, ranks, gradients, point=point, order=order)
            for rank, held in zip(self._found, ranks, strict=True):
                for name, own in held.items():
                    error = _error(own, gradients.get(name, []), scale)
                    yield Difference(
                        kind="gradient",
                        step=index,
                        name=name,
                        error=error,
                        tolerance=tolerance,
                        point=point,
                        place=_place(rank),
                        order=order,
                    )
        last = next(reversed(expected.gradients.values()), {})
        rounding = min(10 * tolerance, 0.01)
        least = rounding * _rms(last) * _FLOOR
        for name, held in last.items():
            # An element whose gradient is rounding is divided by itself by some optimizers: it is not compared from here on.
            value = held[0][1].abs()
            counts = value >= max(least, rounding * float(value.double().square().mean().sqrt()))
            self._significant[name] = self._significant.get(name, torch.ones_like(counts)) & counts

    def _weights(self, index: int, found: Sequence[StepRecord], expected: StepRecord) -> Iterator[Difference]:
        start = self._expected.start.weights
        for rank, step in zip(self._found, found, strict=True):
            for name, held in step.weights.items():
                if name not in expected.weights or name not in self._significant:
                    continue
                whole, mask = expected.weights[name], self._significant[name]
                way = [((0,) * mask.dim(), (whole[0][1].double() - start[name][0][1].double()) * mask)]
                own = [(offset, (value.double() - _part(start[name], offset, value)) * _cut(mask, offset, value)) for offset, value in held]
                error = _error(own, way, 1e-3 * _rms({"": way}) or 1e-30)
                yield Difference(
                    kind="weight", step=index, name=name, error=error, tolerance=self._tolerance.weight, place=_place(rank)
                )

    def _missing(
        self, kind: str, index: int, found: Sequence[Mapping[str, Held]], expected: Mapping[str, Held], *, point: str = "", order: int = 0
    ) -> Iterator[Difference]:
        held = {name for rank in found for name in rank}
        for name, value in expected.items():
            if name not in held and any(bool(part.any()) for _, part in value):
                yield Difference(
                    kind=kind, step=index, name=name, error=math.inf, tolerance=0.0, point=point, order=order, text="is on no rank"
                )

    def _tensor(
        self, kind: str, index: int, name: str, rank: Record, held: Held, expected: Held, tolerance: float
    ) -> Difference:
        return Difference(
            kind=kind, step=index, name=name, error=_error(held, expected, 1e-30), tolerance=tolerance, place=_place(rank)
        )

    def _numbers(
        self,
        kind: str,
        index: int,
        found: Sequence[Mapping[str, float]],
        expected: Mapping[str, float],
        weights: Sequence[float],
    ) -> Iterator[Difference]:
        """Compare the mean over the replicas: a value that is logged without sync_dist=True is each replica's own."""
        for name in sorted({*expected, *(name for rank in found for name in rank)}):
            own = [(rank[name], weight) for rank, weight in zip(found, weights, strict=True) if name in rank]
            if not own or name not in expected:
                text = "is logged, but not in one process" if own else "is not logged"
                yield Difference(kind=kind, step=index, name=name, error=math.inf, tolerance=0.0, text=text)
                continue
            local = len({value for value, _ in own}) > 1
            if local and kind == "metric" and self._expected.counted:
                continue  # replicas' means over unknown numbers of tokens
            total = sum(weight for _, weight in own)
            mean = sum(value * weight for value, weight in own) / total if local and total else own[0][0]
            yield self._value(kind, index, name, mean, expected[name])

    def _value(self, kind: str, index: int, name: str, found: float, expected: float) -> Difference:
        same = found == expected or (math.isnan(found) and math.isnan(expected))
        error = 0.0 if same else abs(found - expected) / max(abs(expected), 1e-3)
        text = "" if same else f"{found:.8g} instead of {expected:.8g}"
        return Difference(kind=kind, step=index, name=name, error=error, tolerance=self._tolerance.value, text=text)


def _place(rank: Record) -> str:
    return f"rank {rank.rank} ({rank.place})" if rank.place else f"rank {rank.rank}"


def _mean_loss(ranks: Sequence[StepRecord]) -> float:
    pairs = [pair for step in ranks for pair in step.losses if pair[1]]
    weight = sum(tokens for _, tokens in pairs)
    return sum(loss * tokens for loss, tokens in pairs) / weight if weight else math.nan


def _rms(values: Mapping[str, Held]) -> float:
    squares = sum(float(part.double().square().sum()) for held in values.values() for _, part in held)
    return math.sqrt(squares / max(sum(part.numel() for held in values.values() for _, part in held), 1))


def _cut(whole: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))]


def _part(whole: Held, offset: Sequence[int], like: Tensor) -> Tensor:
    return _cut(whole[0][1], offset, like)


def _pairs(held: Held, expected: Held) -> Iterator[tuple[Tensor, Tensor]]:
    """(a rank's part, the same part in one process)."""
    for offset, value in held:
        yield value, _part(expected, offset, value) if expected else torch.zeros_like(value)


def _error(held: Held, expected: Held, floor: float) -> float:
    """Relative norm of the difference; of what is expected at least ``floor`` an element counts."""
    off = size = count = 0.0
    for value, other in _pairs(held, expected):
        both_nan = value.isnan() & other.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)
        difference = (value.double() - other.double()).masked_fill(both_nan, 0.0)
        off += float(difference.square().sum())
        size += float(other.double().masked_fill(both_nan, 0.0).square().sum())
        count += value.numel()
    if off == 0:
        return 0.0
    return math.sqrt(off) / max(math.sqrt(size), floor * math.sqrt(count), 1e-300)


