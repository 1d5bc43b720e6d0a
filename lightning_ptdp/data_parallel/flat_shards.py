"""A range of a flattened parameter, and the rectangles of the parameter that it is made of.

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
    """[start, stop) of a flattened tensor.

    Attributes:
        shape: Of the whole tensor.
        start: First element.
        stop: One past the last.
        offset: Where ``start`` is in the bucket's buffer.
    """

    shape: Shape
    start: int
    stop: int
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def within(self, buffer: Tensor) -> Tensor:
        """(size,) view of the bucket's flat buffer."""
        return buffer[self.offset : self.offset + self.size]

    def rectangles(self) -> Iterator[tuple[Shape, Shape, int]]:
        """(offset in the tensor, extent, offset in the shard) of rectangles that make up the range;
        2 n - 1 at most of n dimensions."""
        yield from _rectangles(self.shape, self.start, self.stop, self.start)

    def overlap(self, where: Sequence[slice], flat: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """(offset within ``where``, view of ``flat`` (size,)) of what the tensor's rectangle
        ``where`` has in common with the range."""
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
    """Rectangles of [start, stop); positions are counted from ``origin``."""
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
    """Rectangles of a part of row ``index``."""
    base = index * math.prod(shape[1:])
    for offset, extent, position in _rectangles(shape[1:], start - base, stop - base, 0):
        yield (index, *offset), (1, *extent), position + base - origin


@dataclass(frozen=True, kw_only=True)
class FlatSharding:
    """Position of a shard of a local tensor in the full tensor; checkpoints and norms read it in
    place of a ``Sharding``.

    Attributes:
        whole: Of the whole local tensor.
        shard: The range of it that is here.
    """

    whole: Sharding
    shard: Shard

    @property
    def full_shape(self) -> Shape:
        """Shape of the full tensor."""
        return self.whole.full_shape

    @property
    def local_shape(self) -> Shape:
        """(elements of the shard,)."""
        return (self.shard.size,)

    def held(self, local: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """(offset in the full tensor, view of ``local``) of every rectangle that is here."""
        for piece in self.whole.pieces:
            for inside, view in self.shard.overlap(piece.local_slices, local):
                yield (
                    tuple(begin + step for begin, step in zip(piece.full, inside, strict=True)),
                    view,
                )

    def counted(self, local: Tensor) -> list[Tensor]:
        """Views of ``local`` that together leave out what an earlier tensor-parallel rank holds as
        well."""
        if not self.whole.copies:
            return [local]
        first = [piece for piece in self.whole.pieces if piece.copy == 0]
        return [
            view for piece in first for _, view in self.shard.overlap(piece.local_slices, local)
        ]
