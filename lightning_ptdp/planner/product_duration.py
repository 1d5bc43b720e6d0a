"""Seconds of a matrix product by its shape: tiles, waves, depth.

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

from lightning_ptdp.planner.devices import Device

__all__ = ["product_time"]

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
