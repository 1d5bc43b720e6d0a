"""Comparison of a layout's record with that of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.verification.record import Held, Key, Pairs, Record

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
"""Kinds of compared values, in the order of a step."""
_NOISE = 8
"""A tolerance is at least this multiple of the error of the comparison ``noise``."""
_FLOOR = 1e-3
"""Smallest divisor of a relative error.

A tensor's error is relative to the tensor's own size, but at least to this fraction of the model's.
A number's error is relative to the number, but at least to this value.
"""


@dataclass(frozen=True)
class Difference:
    """One compared value.

    Attributes:
        kind: One of ``KINDS``.
        step: Number of the step, from 0; -1 before the first.
        name: Parameter, buffer, metric or option.
        point: Hook after which a gradient is compared.
        error: Relative error.
        tolerance: Largest error of equal values.
        place: Rank and its coordinates.
        text: Both values, if they are numbers.
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
        if not self.error:
            return 0.0
        if self.tolerance and self.error == self.error:
            return self.error / self.tolerance
        return math.inf

    @property
    def differs(self) -> bool:
        """Return True if the error is more than rounding."""
        return self.excess > 1

    def __str__(self) -> str:
        step = "before step 0" if self.step < 0 else f"step {self.step}"
        name = f" '{self.name}'" if self.name else ""
        point = f" after {self.point}" if self.point else ""
        place = f" on {self.place}" if self.place else ""
        return f"{step}: {self.kind}{name}{point}{place} {self.text or f'is {self.error:.1e} off'}"


class Comparison:
    """Comparison of the ranks of a layout with one process.

    All tolerances are relative, and cover the effect of another order of summation. Losses and
    logged values are compared by value. Gradients and buffers are compared by the norm of their
    difference. Weights are compared by the norm of their change since the start, with a larger
    tolerance: optimizers such as Adam divide a gradient by itself, and thereby amplify its
    rounding.

    Args:
        found: Records of the layout's ranks.
        expected: Record of one process.
        noise: The same comparison of one process with itself, in another precision or from
            disturbed weights; it enlarges the tolerances.

    Attributes:
        compared: All compared values, in the order of the training. Of one step, kind and hook, the
            largest difference is first.
    """

    def __init__(
        self, found: Sequence[Record], expected: Record, noise: Sequence[Difference] = ()
    ) -> None:
        self.found = found
        self.expected = expected
        # Modules in float64 often compute parts in float32.
        eps = max(expected.eps, 1e-8)
        value = min(128 * eps, 0.05)
        tensor = min(1024 * eps, 0.5)
        self._tolerances = {
            **dict.fromkeys(("loss", "logged value", "metric"), value),
            "gradient": tensor,
            "buffer": tensor,
            "weight": min(3 * math.sqrt(eps), 0.5),
        }
        self._insignificant = min(10 * tensor, 0.01)
        rounded = sorted((diff for diff in noise if diff.tolerance), key=lambda diff: diff.error)
        # The largest noise over all steps counts, because that of a single step is random.
        self._noise = {(diff.kind, diff.name): _NOISE * diff.error for diff in rounded}
        self._significant: dict[str, Tensor] = {}
        parts = [
            self._exact(),
            *map(self._tensors, expected.tensors),
            *map(self._numbers, expected.numbers),
        ]
        compared = [diff for part in parts for diff in sorted(part, key=lambda diff: -diff.excess)]
        self.compared = sorted(compared, key=lambda diff: (diff.step, KINDS.index(diff.kind)))

    @property
    def differences(self) -> list[Difference]:
        """Return the values that differ, in the order of the training."""
        return [diff for diff in self.compared if diff.differs]

    def allowing(self, other: Record) -> Comparison:
        """Return the comparison with tolerances that cover the differences of ``other``.

        ``other`` is a record of one process under a change that has no effect except rounding.
        """
        return Comparison(self.found, self.expected, Comparison([other], self.expected).compared)

    def _difference(
        self, key: Key, name: str, error: float, *, text: str = "", place: str = ""
    ) -> Difference:
        kind, step, point = key
        tolerance = max(self._tolerances.get(kind, 0.0), self._noise.get((kind, name), 0.0))
        return Difference(kind, step, name, point, error, tolerance, place, text)

    def _exact(self) -> Iterator[Difference]:
        """Compare the optimizer options, batches and random numbers, which must be equal.

        The options must be those of one process. Ranks that read the same samples must read the
        same batches, and draw the same random numbers.
        """
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
                    (kind, -1, ""), name, math.inf, text="is in the optimizer of no rank"
                )

    def _tensors(self, key: Key) -> Iterator[Difference]:
        expected = self.expected.tensors[key]
        ranks = [rank.tensors.get(key, {}) for rank in self.found]
        floor = 0.0
        if key[0] == "gradient":
            self._mark(expected)
        if key[0] == "weight":
            expected = self._ways(expected)
            ranks = [self._ways(rank) for rank in ranks]
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
        """Exclude elements with insignificant gradients from later comparisons of weights.

        The gradient of such an element is rounding, and some optimizers divide it by itself.
        """
        floor = _FLOOR * _rms(gradients)
        for name, held in gradients.items():
            counts = held[0][1].abs() >= self._insignificant * max(_rms({name: held}), floor)
            self._significant[name] = self._significant.get(name, counts) & counts

    def _ways(self, weights: Mapping[str, Held]) -> dict[str, Held]:
        """Return the change of the significant elements since the start."""
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
        """Compare the mean over the replicas.

        A value that is logged without sync_dist=True is specific to each replica.
        """
        expected = self.expected.numbers[key]
        actual: dict[str, Pairs] = {}
        for rank in self.found:
            for name, pairs in rank.numbers.get(key, {}).items():
                actual.setdefault(name, []).extend(pairs)
        for name in sorted(expected.keys() ^ actual.keys()):
            yield self._difference(
                key,
                name,
                math.inf,
                text="is missing in one process" if name in actual else "is missing",
            )
        for name in sorted(expected.keys() & actual.keys()):
            values, weights = (set(column) for column in zip(*actual[name], strict=True))
            if key[0] != "loss" and self.expected.counted and len(values) > len(weights) == 1:
                continue  # These are means over unknown numbers of tokens.
            value = _mean(actual[name])
            reference = _mean(expected[name])
            error = _error(_scalar(value), _scalar(reference), _FLOOR)
            yield self._difference(
                key, name, error, text=f"is {value:.8g} instead of {reference:.8g}"
            )


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


def _cut(tensor: Tensor, offset: Sequence[int], like: Tensor) -> Tensor:
    return tensor[
        tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))
    ]


def _error(held: Held, expected: Held, floor: float) -> float:
    """Return the norm of the difference relative to the norm of ``expected``.

    Each expected element counts with at least ``floor``.
    """
    squared_error = size = 0.0
    for offset, value in held:
        value = value.double()
        reference = (
            _cut(expected[0][1], offset, value).double() if expected else torch.zeros_like(value)
        )
        same = value.isclose(reference, rtol=0.0, atol=0.0, equal_nan=True)
        squared_error += float((value - reference)[~same].square().sum())
        size += float(reference[reference.isfinite()].square().clamp(min=floor**2).sum())
    return math.sqrt(squared_error / max(size, 1e-300)) if squared_error else 0.0
