"""Ranges of a flattened parameter, as rectangles of the parameter.

A range [start, stop) of a matrix in row-major order is at most three rectangles::

    . . . a a a     the end of a row
    b b b b b b     whole rows
    b b b b b b
    c c . . . .     the beginning of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_ptdp.parameters.sharding import Sharding

__all__ = ["FlatSharding", "Shard"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Range [start, stop) of a flattened tensor.

    Attributes:
        shape: Shape of the whole tensor.
        start: First element.
        stop: One past the last.
        offset: Offset of ``start`` in the bucket's buffer.
    """

    shape: Shape
    start: int
    stop: int
    offset: int = 0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    def within(self, buffer: Tensor) -> Tensor:
        """Return the range as a (size,) view of the bucket's flat buffer."""
        return buffer[self.offset : self.offset + self.size]

    def rectangles(self) -> Iterator[tuple[Shape, Shape, int]]:
        """Yield (offset in the tensor, extent, offset in the shard) of the range's rectangles.

        A tensor of n dimensions has at most 2 n - 1 rectangles.
        """
        yield from _rectangles(self.shape, self.start, self.stop, self.start)

    def overlap(self, where: Sequence[slice], flat: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Intersect the range with the tensor's rectangle ``where``.

        Yields (offset within ``where``, view of ``flat`` (size,)) of the common rectangles.
        """
        for offset, extent, position in self.rectangles():
            lows = [max(begin, cut.start) for begin, cut in zip(offset, where, strict=True)]
            highs = [
                min(begin + size, cut.stop)
                for begin, size, cut in zip(offset, extent, where, strict=True)
            ]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                view = flat[position : position + math.prod(extent)].view(extent)
                cuts = tuple(
                    slice(low - begin, high - begin)
                    for low, high, begin in zip(lows, highs, offset, strict=True)
                )
                yield (
                    tuple(low - cut.start for low, cut in zip(lows, where, strict=True)),
                    view[cuts],
                )


def _rectangles(
    shape: Shape, start: int, stop: int, origin: int
) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield the rectangles of [start, stop); positions are counted from ``origin``."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start - origin
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _row(shape, first - 1, start, stop, origin)
        return
    yield from _row(shape, first - 1, start, first * row, origin)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:]), first * row - origin
    yield from _row(shape, last, last * row, stop, origin)


def _row(
    shape: Shape, index: int, start: int, stop: int, origin: int
) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield the rectangles of a part of row ``index``."""
    base = index * math.prod(shape[1:])
    for offset, extent, position in _rectangles(shape[1:], start - base, stop - base, 0):
        yield (index, *offset), (1, *extent), position + base - origin


@dataclass(frozen=True, kw_only=True)
class FlatSharding:
    """Position of a shard of a local tensor in the full tensor.

    Checkpoints and norms use it in place of a ``Sharding``.

    Attributes:
        whole: Sharding of the whole local tensor.
        shard: The range of the local tensor that this rank holds.
    """

    whole: Sharding
    shard: Shard

    @property
    def full_shape(self) -> Shape:
        """Return the shape of the full tensor."""
        return self.whole.full_shape

    @property
    def local_shape(self) -> Shape:
        """Return (elements of the shard,)."""
        return (self.shard.size,)

    def held(self, local: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Yield (offset in the full tensor, view of ``local``) of every local rectangle."""
        for piece in self.whole.pieces:
            for inside, view in self.shard.overlap(piece.local_slices, local):
                yield (
                    tuple(begin + step for begin, step in zip(piece.full, inside, strict=True)),
                    view,
                )

    def counted(self, local: Tensor) -> list[Tensor]:
        """Return views of ``local`` without the parts that an earlier rank also holds.

        Several tensor-parallel ranks may hold copies of the same part.
        """
        if not self.whole.copies:
            return [local]
        first = [piece for piece in self.whole.pieces if piece.copy == 0]
        return [
            view for piece in first for _, view in self.shard.overlap(piece.local_slices, local)
        ]
