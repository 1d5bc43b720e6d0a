"""Ranges of a flattened tensor, as rectangles of the tensor.

A range [start, stop) of a matrix in row-major order is at most three rectangles::

    . . . a a a     the end of a row
    b b b b b b     whole rows
    b b b b b b
    c c . . . .     the beginning of a row
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from lightning_ptdp.parameters.rectangle import Rectangle

__all__ = ["overlap", "range_rectangles"]

Shape = tuple[int, ...]


def overlap(
    shape: Shape, start: int, where: Rectangle, flat: Tensor
) -> Iterator[tuple[Shape, Tensor]]:
    """Intersect a range of a tensor of ``shape`` with the tensor's rectangle ``where``.

    Yields (offset within ``where``, view of ``flat``) of the common rectangles. ``flat`` holds the
    values of the range, which begins at ``start``.
    """
    position = 0
    for rectangle in range_rectangles(shape, start, start + flat.numel()):
        common = rectangle.common(where)
        if common.numel:
            values = flat[position : position + rectangle.numel].view(rectangle.shape)
            view = values[common.seen_from(rectangle.begin).slices]
            yield common.seen_from(where.begin).begin, view
        position += rectangle.numel


def range_rectangles(shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles of [start, stop) of a tensor, in the order of their elements.

    A tensor of n dimensions has at most 2 n - 1 of them.
    """
    if not shape and start < stop:
        yield Rectangle((), ())
        return
    row, zeros = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    while start < stop:
        index, inside = divmod(start, row)
        whole_rows = 0 if inside else (stop - start) // row
        if whole_rows:
            yield Rectangle.at((index, *zeros), (whole_rows, *shape[1:]))
        else:
            for part in range_rectangles(shape[1:], inside, min(stop - index * row, row)):
                yield Rectangle((index, *part.begin), (index + 1, *part.end))
        start = min(stop, (index + max(whole_rows, 1)) * row)
