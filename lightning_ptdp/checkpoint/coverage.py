"""Whether rectangles make up a tensor: every element in one of them, and in no more than one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = ["Rectangle", "check_cover"]

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins and where it ends, for each dimension."""

_MOST_CUT = 8  # dimensions; a corner is one of 2 to this power
_MOST_NAMED = 200


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
    parts = [rectangle for rectangle in rectangles if _volume(rectangle)]
    if _make_up(whole, parts):
        return
    if len(parts) > _MOST_NAMED:
        raise CheckpointError(f"{name!r}: the {len(parts)} rectangles {doing} leave out elements or have some twice")
    left = [whole] if math.prod(shape) else []
    for rectangle in sorted(parts):
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


def _make_up(whole: Rectangle, parts: Sequence[Rectangle]) -> bool:
    """Whether every element is in one part and no part reaches beyond, at a cost that grows as the number of parts.

    How many parts an element is in, as a function on the grid, is known from its mixed differences, which are zero but at corners: the
    corners of the parts, with their signs, must be those of the whole.
    """
    cut = [
        dim for dim, full in enumerate(zip(*whole, strict=True)) if any((part[0][dim], part[1][dim]) != full for part in parts)
    ]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for rectangle, sign in [*((part, 1) for part in parts), *([(whole, -1)] if _volume(whole) else [])]:
        for ends in product((0, 1), repeat=len(cut)):
            corners[tuple(rectangle[end][dim] for end, dim in zip(ends, cut, strict=True))] += sign * (-1) ** sum(ends)
    return not any(corners.values())


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
