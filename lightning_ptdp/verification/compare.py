"""Comparison of a layout's record with that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.verification.record import Held, Key, Pairs, Record

__all__ = ["KINDS", "Comparison", "Difference"]

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
"""A tensor is compared with its own size, but at least with this part of the model's; a number with
at least this."""


@dataclass(frozen=True)
class Difference:
    """One compared value.

    Attributes:
        kind: One of ``KINDS``.
        step: From 0; -1 before the first.
        name: Parameter, buffer, metric or option.
        point: Hook behind which a gradient is compared.
        error: Relative.
        tolerance: Largest error of equal values.
        place: Rank and its coordinates.
        text: Both values, where they are numbers.
    """

    kind: str
    step: int
    name: str
    point: str
    error: float
    tolerance: float
    place: str
    text: str

    @property
    def excess(self) -> float:
        """Return the error as a multiple of the tolerance."""
        if self.error == 0:
            return 0.0
        return (
            self.error / self.tolerance if self.tolerance and self.error == self.error else math.inf
        )

    @property
    def differs(self) -> bool:
        """Return True if the error is more than rounding."""
        return self.excess > 1

    def __str__(self) -> str:
        when = "before step 0" if self.step < 0 else f"step {self.step}"
        named = f" '{self.name}'" if self.name else ""
        point = f" after {self.point}" if self.point else ""
        where = f" on {self.place}" if self.place else ""
        return f"{when}: {self.kind}{named}{point}{where} {self.text or f'is {self.error:.1e} off'}"


class Comparison:
    """Comparison of the ranks of a layout with one process.

    Tolerances, all relative, are those that another order of sums explains. Values are losses and
    logged values; gradients and buffers are compared by norm; so is the way that a weight went, but
    optimizers such as Adam divide a gradient by itself, and so its rounding.

    Args:
        found: Of the layout's ranks.
        expected: Of one process.
        noise: The same comparison of one process with itself, in another precision or from
            disturbed weights; enlarges the tolerances.

    Attributes:
        compared: Everything that is compared, in the order of the training, the largest difference
            of equal ones first.
    """

    def __init__(
        self, found: Sequence[Record], expected: Record, noise: Sequence[Difference] = ()
    ) -> None:
        self.found, self.expected = found, expected
        eps = max(expected.eps, 1e-8)  # modules in float64 often compute parts in float32
        value, tensor = min(128 * eps, 0.05), min(1024 * eps, 0.5)
        self._tolerances = dict.fromkeys(("loss", "logged value", "metric"), value)
        self._tolerances |= {
            "gradient": tensor,
            "buffer": tensor,
            "weight": min(3 * math.sqrt(eps), 0.5),
        }
        self._insignificant = min(10 * tensor, 0.01)
        rounded = sorted((one for one in noise if one.tolerance), key=lambda one: one.error)
        self._noise = {
            (one.kind, one.name): _NOISE * one.error for one in rounded
        }  # that of a single step is chance
        self._significant: dict[str, Tensor] = {}
        parts = [
            self._exact(),
            *map(self._tensors, expected.tensors),
            *map(self._numbers, expected.numbers),
        ]
        compared = [one for part in parts for one in sorted(part, key=lambda one: -one.excess)]
        self.compared = sorted(compared, key=lambda one: (one.step, KINDS.index(one.kind)))

    @property
    def differences(self) -> list[Difference]:
        """The values that differ, the first in the training first."""
        return [one for one in self.compared if one.differs]

    def allowing(self, other: Record) -> Comparison:
        """Return the comparison with tolerances that cover what one process gives under a change
        that is none."""
        return Comparison(self.found, self.expected, Comparison([other], self.expected).compared)

    def _difference(
        self, key: Key, name: str, error: float, *, text: str = "", place: str = ""
    ) -> Difference:
        kind, step, point = key
        tolerance = max(self._tolerances.get(kind, 0.0), self._noise.get((kind, name), 0.0))
        return Difference(kind, step, name, point, error, tolerance, place, text)

    def _exact(self) -> Iterator[Difference]:
        """Options are those of one process. Ranks that read the same samples read the same batches,
        and draw the same numbers."""
        first: dict[tuple[object, ...], str] = {}
        for rank in self.found:
            for (kind, name), value in rank.exact.items():
                expected = self.expected.exact.get((kind, name), "no group")
                text = f"is {value} instead of {expected}"
                if kind != "optimizer option":
                    expected = first.setdefault((rank.replica, rank.context, kind, name), value)
                    text = "differs from other ranks that read the same samples"
                error = 0.0 if value == expected else math.inf
                yield self._difference((kind, -1, ""), name, error, text=text, place=rank.place)
        trained = {key for rank in self.found for key in rank.exact}
        for kind, name in sorted(self.expected.exact.keys() - trained):
            if kind == "optimizer option":
                yield self._difference(
                    (kind, -1, ""), name, math.inf, text="is in no rank's optimizer"
                )

    def _tensors(self, key: Key) -> Iterator[Difference]:
        expected = self.expected.tensors[key]
        ranks = [rank.tensors.get(key, {}) for rank in self.found]
        floor = 0.0
        if key[0] == "gradient":
            self._mark(expected)
        if key[0] == "weight":
            expected, ranks = self._ways(expected), [self._ways(rank) for rank in ranks]
        if key[0] in ("gradient", "weight"):
            floor = _FLOOR * _rms(expected)
        for rank, tensors in zip(self.found, ranks, strict=True):
            for name, held in tensors.items():
                yield self._difference(
                    key, name, _error(held, expected.get(name, []), floor), place=rank.place
                )
        for name in sorted(expected.keys() - set().union(*ranks)):
            if expected[name][0][1].any():
                yield self._difference(key, name, math.inf, text="is on no rank")

    def _mark(self, gradients: Mapping[str, Held]) -> None:
        """An element whose gradient is rounding is divided by itself by some optimizers: it is not
        compared from here on."""
        floor = _FLOOR * _rms(gradients)
        for name, held in gradients.items():
            counts = held[0][1].abs() >= self._insignificant * max(_rms({name: held}), floor)
            self._significant[name] = self._significant.get(name, counts) & counts

    def _ways(self, weights: Mapping[str, Held]) -> dict[str, Held]:
        """Return how far significant elements went since the start."""
        start = self.expected.tensors["initial value", -1, ""]
        return {
            name: [
                (
                    offset,
                    (value.double() - _cut(start[name][0][1], offset, value))
                    * _cut(self._significant[name], offset, value),
                )
                for offset, value in held
            ]
            for name, held in weights.items()
            if name in start and name in self._significant
        }

    def _numbers(self, key: Key) -> Iterator[Difference]:
        """Compare the mean over the replicas: a value that is logged without sync_dist=True is each
        replica's own."""
        expected = self.expected.numbers[key]
        found: dict[str, Pairs] = {}
        for rank in self.found:
            for name, pairs in rank.numbers.get(key, {}).items():
                found.setdefault(name, []).extend(pairs)
        for name in sorted(expected.keys() ^ found.keys()):
            yield self._difference(
                key,
                name,
                math.inf,
                text="is missing in one process" if name in found else "is missing",
            )
        for name in sorted(expected.keys() & found.keys()):
            values, weights = (set(each) for each in zip(*found[name], strict=True))
            if key[0] != "loss" and self.expected.counted and len(values) > len(weights) == 1:
                continue  # means over unknown numbers of tokens
            value, other = _mean(found[name]), _mean(expected[name])
            error = _error(_scalar(value), _scalar(other), _FLOOR)
            yield self._difference(key, name, error, text=f"is {value:.8g} instead of {other:.8g}")


def _mean(pairs: Pairs) -> float:
    counted = [pair for pair in pairs if pair[1]] or [(pairs[0][0], 1.0)]
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _scalar(value: float) -> Held:
    return [((), torch.tensor(value, dtype=torch.float64))]


def _rms(tensors: Mapping[str, Held]) -> float:
    parts = [value.double() for held in tensors.values() for _, value in held]
    return math.sqrt(
        sum(float(part.square().sum()) for part in parts)
        / max(sum(part.numel() for part in parts), 1)
    )


def _cut(whole: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    return whole[
        tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))
    ]


def _error(held: Held, expected: Held, floor: float) -> float:
    """Relative norm of the difference; of what is expected at least ``floor`` an element counts."""
    off = size = 0.0
    for offset, value in held:
        value = value.double()
        other = (
            _cut(expected[0][1], offset, value).double() if expected else torch.zeros_like(value)
        )
        same = value.isclose(other, rtol=0.0, atol=0.0, equal_nan=True)
        off += float((value - other)[~same].square().sum())
        size += float(other[other.isfinite()].square().clamp(min=floor**2).sum())
    return math.sqrt(off / max(size, 1e-300)) if off else 0.0
