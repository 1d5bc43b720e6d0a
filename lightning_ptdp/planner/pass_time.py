"""Seconds of one microbatch in a part of the model, and of its products.

A product (m, k) x (k, n) is computed in tiles of the result, one tile per multiprocessor at a time.
If the number of tiles is not a multiple of the number of multiprocessors, some are idle in the last
wave (NVIDIA, Matrix Multiplication Background User's Guide, "Dimension quantization effects"). The
time of a tile is that of its operations at the rate of a multiprocessor, or that of loading its
operands at its share of the cache. A tile waits for memory before its first multiplication and
after its last, and is then stored. The library chooses the best tile, and may split the depth k
into parts that are summed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from lightning_ptdp.planner.devices import Device
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import Product


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one microbatch in a part of the model. The times of parts are added.

    Attributes:
        forward: The forward pass.
        backward: The backward pass, including recomputation and weight gradients.
        weight: Part of ``backward`` for the gradients of the weights, which a schedule may defer.
        waiting: Part of ``forward`` that waits for collectives, except those of experts.
        waiting_back: Part of ``backward`` that waits for them.
        experts: Part of both passes for the products of experts.
        dispatch: Part of both passes for the all-to-alls of experts.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    waiting: float = 0.0
    waiting_back: float = 0.0
    experts: float = 0.0
    dispatch: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def times(self, count: float) -> PassTime:
        """Return the time of ``count`` such passes in sequence."""
        return PassTime(**{name: count * value for name, value in vars(self).items()})

    @property
    def communication(self) -> float:
        """Return the part of both passes that waits for collectives, except those of experts."""
        return self.waiting + self.waiting_back


NOTHING = PassTime()


def waits(forward: float, backward: float) -> PassTime:
    """Return the time of collectives for which both passes wait."""
    return PassTime(forward=forward, backward=backward, waiting=forward, waiting_back=backward)


def product_passes(job: Job, choice: Choice, product: Product, *, float8: bool = False) -> PassTime:
    """Return the time of (rows, inputs) times (inputs, outputs), and of its gradients."""
    device = job.device
    width = job.precision.compute
    rows = max(1, round(choice.samples * product.rows))
    if product.cut == "rows":
        rows = max(1, rows // choice.t)
    outputs, inputs = product.local(choice.t)
    cast = cast_back = 0.0
    if float8 and product.weighted:
        # Each operand is read for its maximum and read again for the cast. Float8 products need the
        # summed dimension last, so the operands of the weight gradient are transposed.
        read = 2 * width + 1
        width = 1
        cast = rows * inputs * read / device.stream
        cast_back = (rows * outputs * (read + 2) + rows * inputs * 2) / device.stream
    trained = job.trained if product.weighted else 1
    weight = trained * product_time(device, width, outputs, inputs, rows)
    return PassTime(
        forward=cast + product_time(device, width, rows, outputs, inputs),
        backward=cast_back + product_time(device, width, rows, inputs, outputs) + weight,
        weight=weight,
    )


def num_logits(job: Job, choice: Choice) -> float:
    """Return the number of logits of a microbatch on one rank."""
    if not job.shape.head.products:
        return 0.0
    last = job.shape.head.products[-1]
    return choice.samples * last.rows * last.local(choice.t)[0]


_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Tiles of cuBLAS, from the guide named above."""
_PARTS = (1, 2, 4, 8, 16)
_PARTIAL_SUM = 4


@functools.lru_cache(maxsize=4096)
def product_time(device: Device, width: int, m: int, n: int, k: int, batch: int = 1) -> float:
    """Return the seconds of ``batch`` products of (m, k) and (k, n).

    Args:
        device: Device that computes the products.
        width: Bytes per element.
        m: Rows of the result.
        n: Columns of the result.
        k: Terms of each sum.
        batch: Number of products at a time.
    """
    if device.measured is not None:
        usual = 4 if device.kind == "cpu" else 2
        rate = device.measured.product_rate(m, n, k) * device.peak(width) / device.peak(usual)
        return 2 * batch * m * n * k / rate
    traffic = batch * width * (m * k + k * n + m * n) / device.stream
    return max(
        traffic,
        min(
            _tiled(device, width, m, n, k, batch, tile, parts)
            for tile in _TILES
            for parts in _PARTS
        ),
    )


def _tiled(
    device: Device,
    width: int,
    m: int,
    n: int,
    k: int,
    batch: int,
    tile: tuple[int, int],
    parts: int,
) -> float:
    if parts > 1 and k < 512 * parts:
        return math.inf
    rows, columns = tile
    depth = -(-k // parts)
    tiles = batch * -(-m // rows) * -(-n // columns) * parts
    rate = device.peak(width) * device.product_share * device.sustained / device.units
    multiply = 2 * rows * columns * depth / rate
    load = (rows + columns) * width * depth * device.units / device.cache_bandwidth
    store = rows * columns * width * device.units / device.stream
    waves = -(-tiles // device.units)
    sums = 2 * parts * batch * m * n * _PARTIAL_SUM / device.stream if parts > 1 else 0.0
    return waves * (max(multiply, load) + store + 2 * device.memory_latency_s) + sums
