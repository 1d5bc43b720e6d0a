"""Measurements of ``ptdp doctor --calibrate``, in place of a data sheet's figures and assumed
shares of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_ptdp.base.option_types import Count, Size, check_types

__all__ = ["Measured"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Every figure was found in the processes that training would have, while as many of them were
    busy as there are cores for.

    Attributes:
        processes: How many there were.
        cores: That the processes of a node share; 0: each has a device of its own.
        products: Matrix products: (m, n, k, operations a second).
        attention: The fused kernel, causal: (positions, channels of a head, operations a second of
            the forward, and of the backward), of the whole square and as if the backward were 2.5
            forwards.
        gated: Bytes a second of what lies between the products of a layer with RMSNorm and SwiGLU;
            ``Device.stream`` is that of one with LayerNorm and GELU. Bytes are those that the
            planner counts, here and below.
        loss: The same of the loss and its backward.
        optimizer: The same of a step of the optimizer.
        fresh_s: Seconds to touch a byte of memory that a process has just been given
            (first_touch.py).
        operation_s: Seconds of the host for an operation.
        waiting: Of a core, what a rank uses while it waits for a collective: threads of its own
            receive, sum and send.

    Raises:
        ValueError: A figure is not positive.
    """

    processes: Size
    cores: Count = 0
    products: tuple[tuple[int, int, int, float], ...]
    attention: tuple[tuple[int, int, float, float], ...]
    gated: float
    loss: float
    optimizer: float
    fresh_s: float = 0.0
    operation_s: float
    waiting: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = [one for row in value for one in row] if isinstance(value, tuple) else [value]
            zero = field.name in ("cores", "fresh_s", "waiting")
            if any(not (one > 0 or (zero and one == 0)) for one in numbers):
                raise ValueError(f"{field.name}={value!r:.80} must be greater than 0")
        if not self.products or not self.attention:
            raise ValueError("products and attention must not be empty")

    def product_rate(self, m: int, n: int, k: int) -> float:
        """Operations a second, between the measured shapes that are nearest on a logarithmic
        scale."""
        return _between([(shape, rate) for *shape, rate in self.products], (m, n, k))

    def attention_rates(self, positions: int, channels: int) -> tuple[float, float]:
        """Operations a second of the forward and of the backward, likewise."""
        where = (positions, channels)
        forward = _between([(place, forward) for *place, forward, _ in self.attention], where)
        return forward, _between(
            [(place, backward) for *place, _, backward in self.attention], where
        )


def _between(points: Sequence[tuple[Sequence[int], float]], where: Sequence[int]) -> float:
    near = sorted(
        (sum(math.log2(one / other) ** 2 for one, other in zip(where, place, strict=True)), rate)
        for place, rate in points
    )
    weights = [(1 / (distance + 1e-3) ** 2, rate) for distance, rate in near[:4]]
    return math.exp(
        sum(weight * math.log(rate) for weight, rate in weights)
        / sum(weight for weight, _ in weights)
    )
