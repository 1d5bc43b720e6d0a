"""Rectangle: a part of a tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A part of a tensor.

    Attributes:
        begin: Position at which it begins, for each dimension.
        end: Position at which it ends, for each dimension.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def at(cls, offset: Sequence[int], shape: Sequence[int]) -> Rectangle:
        """Return the rectangle that begins at ``offset`` and has this shape."""
        return cls(tuple(offset), tuple(map(operator.add, offset, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extents."""
        return tuple(map(operator.sub, self.end, self.begin))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(max(extent, 0) for extent in self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index in the tensor."""
        return tuple(map(slice, self.begin, self.end))

    def common(self, other: Rectangle) -> Rectangle:
        """Return the intersection; without elements if it is empty."""
        return Rectangle(
            tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end))
        )

    def seen_from(self, origin: Sequence[int]) -> Rectangle:
        """Return the same rectangle in a tensor that begins at ``origin`` of this one."""
        return Rectangle(
            tuple(map(operator.sub, self.begin, origin)), tuple(map(operator.sub, self.end, origin))
        )

    def around(self, hole: Rectangle) -> Iterator[Rectangle]:
        """Yield the rest of this rectangle around a rectangle inside it.

        For each dimension, the rest has a part before and a part after the inner rectangle.
        """
        begin = list(self.begin)
        end = list(self.end)
        for dim, (first, last) in enumerate(zip(*hole, strict=True)):
            for low, high in ((begin[dim], first), (last, end[dim])):
                if low < high:
                    yield Rectangle(
                        (*begin[:dim], low, *begin[dim + 1 :]), (*end[:dim], high, *end[dim + 1 :])
                    )
            begin[dim] = first
            end[dim] = last

    def __str__(self) -> str:
        return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(*self, strict=True))}]"
