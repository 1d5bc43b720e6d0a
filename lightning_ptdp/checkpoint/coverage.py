"""Whether rectangles make up a tensor: every element in one of them, and in no more than one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = ["Rectangle", "check_cover"]

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins and where it ends, for each dimension."""


def check_cover(name: str, shape: Sequence[int], rectangles: Iterable[Rectangle], doing: str) -> None:
    """Check that ``rectangles`` make up the tensor ``name`` of ``shape``.

    Args:
        name: For the message.
        shape: The whole.
        rectangles: Its parts.
        doing: What they are for, for the message: ``"to save"``.

    Raises:
        CheckpointError: An element is in none of them, in two, or one reaches beyond the whole; names the region.
    """
    whole: Rectangle = ((0,) * len(shape), tuple(shape))
    left = [whole] if math.prod(shape) else []
    # What is left stays a few pieces if what is taken away comes in order.
    for rectangle in sorted(rectangles):
        if not _volume(rectangle):
            continue
        taken = 0
        rest: list[Rectangle] = []
        for piece in left:
            common = _common(piece, rectangle)
            if _volume(common):
                taken += _volume(common)
                rest.extend(_without(piece, common))
            else:
                rest.append(piece)
        if taken < _volume(rectangle):
            beyond = _common(whole, rectangle) != rectangle
            what = f"is not in the tensor of {tuple(shape)}" if beyond else "has elements that are in another one too"
            raise CheckpointError(f"{name!r}: of the rectangles {doing}, {_shown(rectangle)} {what}")
        left = rest
    if left:
        missing = sum(map(_volume, left))
        raise CheckpointError(
            f"{name!r}: the rectangles {doing} cover {math.prod(shape) - missing} of {math.prod(shape)} elements; "
            f"{_shown(left[0])} is in none of them"
        )


def _volume(rectangle: Rectangle) -> int:
    return math.prod(max(end - begin, 0) for begin, end in zip(*rectangle, strict=True))


def _common(one: Rectangle, other: Rectangle) -> Rectangle:
    return tuple(map(max, one[0], other[0])), tuple(map(min, one[1], other[1]))


def _without(whole: Rectangle, hole: Rectangle) -> Iterator[Rectangle]:
    """What is left of a rectangle around one inside of it: for each dimension, what is before and what is behind."""
    begin, end = list(whole[0]), list(whole[1])
    for dim, (first, last) in enumerate(zip(*hole, strict=True)):
        for low, high in ((begin[dim], first), (last, end[dim])):
            if low < high:
                yield (*begin[:dim], low, *begin[dim + 1 :]), (*end[:dim], high, *end[dim + 1 :])
        begin[dim], end[dim] = first, last


def _shown(rectangle: Rectangle) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(*rectangle, strict=True))}]"
