"""Measurements of ``ptdp doctor --calibrate``.

They replace the figures of a data sheet and assumed shares of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_ptdp.base.option_types import Count, Size, check_types

__all__ = ["Measured"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured figures of a device.

    Every figure was measured in the processes that training would have. As many processes were busy
    as there are cores.

    Attributes:
        processes: Number of processes.
        cores: Cores that the processes of a node share; 0 if each has its own device.
        products: Matrix products: (m, n, k, operations per second).
        attention: The fused causal kernel: (positions, channels of a head, operations per second of
            the forward, and of the backward). Operations are those of the whole square, and the
            backward counts as 2.5 forwards.
        gated: Bytes per second of the operations between the products of a layer with RMSNorm and
            SwiGLU; ``Device.stream`` is that of a layer with LayerNorm and GELU. Bytes are those
            that the planner counts, here and below.
        loss: Bytes per second of the loss and its backward.
        optimizer: Bytes per second of an optimizer step.
        fresh_s: Seconds to touch a byte of newly allocated memory (``first_touch.py``).
        operation_s: Seconds of the host per operation.
        waiting: Share of a core that a rank uses while it waits for a collective. Separate threads
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
        """Return the operations per second for a product.

        The rate is interpolated between the nearest measured shapes on a logarithmic scale.
        """
        return _between([(shape, rate) for *shape, rate in self.products], (m, n, k))

    def attention_rates(self, positions: int, channels: int) -> tuple[float, float]:
        """Return the operations per second of an attention's forward and of its backward.

        The rates are interpolated like ``product_rate``.
        """
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
