"""Check that rectangles cover a tensor.

A set of rectangles covers a tensor if every element is in exactly one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.parameters.rectangle import Rectangle

__all__ = ["check_cover"]

_MOST_CUT = 8  # dimensions; a rectangle has 2 to this power corners
_MOST_NAMED = 200


def check_cover(
    name: str, shape: Sequence[int], rectangles: Iterable[Rectangle], doing: str
) -> None:
    """Check that ``rectangles`` cover the tensor ``name`` of ``shape``, each element once.

    Args:
        name: Name of the tensor, for the message.
        shape: Shape of the tensor.
        rectangles: Rectangles of the tensor.
        doing: Purpose of the rectangles, for the message: ``"to save"``.

    Raises:
        CheckpointError: An element is in no rectangle or in two, or a rectangle reaches beyond the
            tensor. The message names the region.
    """
    whole = Rectangle.at((0,) * len(shape), shape)
    given = [rectangle for rectangle in rectangles if rectangle.numel]
    if _make_up(whole, given):
        return
    if len(given) > _MOST_NAMED:
        raise CheckpointError(
            f"{name!r}: the {len(given)} rectangles {doing} do not cover every element exactly once"
        )
    left = [whole] if whole.numel else []
    for rectangle in sorted(given):
        found = [(free, free.common(rectangle)) for free in left]
        if sum(common.numel for _, common in found) < rectangle.numel:
            beyond = whole.common(rectangle) != rectangle
            what = (
                f"is outside the tensor of shape {tuple(shape)}"
                if beyond
                else "overlaps another one"
            )
            raise CheckpointError(f"{name!r}: of the rectangles {doing}, {rectangle} {what}")
        left = [
            rest
            for free, common in found
            for rest in (free.around(common) if common.numel else (free,))
        ]
    if left:
        covered = whole.numel - sum(rectangle.numel for rectangle in left)
        raise CheckpointError(
            f"{name!r}: the rectangles {doing} cover {covered} of {whole.numel} elements; "
            f"{left[0]} is not covered"
        )


def _make_up(whole: Rectangle, given: Sequence[Rectangle]) -> bool:
    """Return True if the rectangles ``given`` cover ``whole``, each element exactly once.

    No rectangle may reach beyond the whole. The cost is linear in the number of rectangles.

    The number of rectangles that contain an element is a function on the grid. It is determined by
    its mixed differences, which are zero except at corners. Therefore the corners of the
    rectangles, with their signs, must be those of the whole.
    """
    cut = [
        dim
        for dim, full in enumerate(zip(*whole, strict=True))
        if any((one.begin[dim], one.end[dim]) != full for one in given)
    ]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for rectangle, sign in [*((one, 1) for one in given), *([(whole, -1)] if whole.numel else [])]:
        for ends in product((0, 1), repeat=len(cut)):
            corners[tuple(rectangle[end][dim] for end, dim in zip(ends, cut, strict=True))] += (
                sign * (-1) ** sum(ends)
            )
    return not any(corners.values())
