"""Rectangles of the full tensors that the ranks hold: the only placements in storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from torch import Tensor

from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.save_agreement import CheckpointError
from lightning_ptdp.parameters.placement import Placement, Shape
from lightning_ptdp.parameters.rectangle import Rectangle

Tensors = Mapping[str, tuple[Tensor, Placement]]
_STRIPS = (8, 4, 2)
_STRIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LocalRectangle:
    """One rectangle of one full tensor, with its values.

    Attributes:
        name: Global name of the full tensor.
        full_shape: Shape of the full tensor.
        offset: Position in the full tensor at which the rectangle begins.
        values: A view of the local tensor with the rectangle's extent. Writing to it writes to the
            local tensor. To save values that are not in memory: a tensor on the meta device;
            ``read`` returns the values when they are written.
        read: Function from the offset and the shape of a part of the rectangle to its values.
    """

    name: str
    full_shape: Shape
    offset: Shape
    values: Tensor
    read: Callable[[Shape, Shape], Tensor] | None = None

    @classmethod
    def full(cls, name: str, values: Tensor) -> LocalRectangle:
        """Return the rectangle of a full tensor."""
        return cls(
            name=name, full_shape=tuple(values.shape), offset=(0,) * values.dim(), values=values
        )

    @property
    def place(self) -> Rectangle:
        """Return the position in the full tensor."""
        return Rectangle.at(self.offset, self.values.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return self.values.nbytes

    def within(self, place: Rectangle) -> LocalRectangle:
        """Return the part of the rectangle at ``place`` of the full tensor."""
        return replace(
            self, offset=place.begin, values=self.values[place.seen_from(self.offset).slices]
        )

    def pieces(self, nbytes: int) -> Iterator[LocalRectangle]:
        """Yield the rectangle in pieces of full rows, each of about ``nbytes``."""
        if not self.offset or self.nbytes <= nbytes:
            yield self
            return
        begin, end = self.place
        rows = max(1, len(self.values) * nbytes // self.nbytes)
        for first in range(begin[0], end[0], rows):
            last = min(first + rows, end[0])
            yield self.within(Rectangle((first, *begin[1:]), (last, *end[1:])))

    def to_write(self) -> Tensor:
        """Return the values, on any device and with any strides."""
        return (
            self.values if self.read is None else self.read(self.offset, tuple(self.values.shape))
        )


def rectangles_of(tensors: Tensors) -> list[LocalRectangle]:
    """Return the rectangles of local tensors.

    Local elements that no rectangle of the placement covers (padding) are left out.

    Raises:
        CheckpointError: A tensor does not have the shape that its placement states.
    """
    rectangles = []
    for name, (tensor, placement) in tensors.items():
        if tuple(tensor.shape) != placement.held_shape:
            raise CheckpointError(
                f"{name!r} has the local shape {tuple(tensor.shape)}, but its placement has "
                f"{placement.held_shape}"
            )
        for offset, values in placement.held(tensor.detach()):
            rectangles.append(
                LocalRectangle(
                    name=name, full_shape=placement.full_shape, offset=offset, values=values
                )
            )
    return rectangles


def cut_strips(rectangles: Iterable[LocalRectangle]) -> Iterator[LocalRectangle]:
    """Yield the rectangles, those of large matrices cut into strips along dimension 1.

    The cuts are at the eighths of the full tensor if an eighth has at least one MiB, else at the
    quarters or halves. They do not depend on the ranks that hold the tensor.

    A file stores a matrix row by row. Any rows can be read alone, but columns are small runs of
    every row. With strips, up to eight ranks that split a matrix by columns read only their own
    part. A matrix at least twice as tall as wide is cut only if this rank holds a part of its
    columns: vocabularies and widening layers have such a shape, and ranks split them by rows
    (arXiv 1909.08053, section 3). Strips cost the save a copy.
    """
    for rectangle in rectangles:
        rows, columns = rectangle.full_shape[:2] if len(rectangle.full_shape) > 1 else (1, 1)
        full_bytes = math.prod(rectangle.full_shape) * rectangle.values.element_size()
        fitting = (n for n in _STRIPS if columns % n == 0 and full_bytes >= n * _STRIP_BYTES)
        held = rectangle.values.shape
        # A sharded optimizer also has parts of single rows, which are not worth a cut.
        is_split = held[1:2] != rectangle.full_shape[1:2] and held[0] > 1
        strips = next(fitting, 1) if rows < 2 * columns or is_split else 1
        if strips == 1:
            yield rectangle
            continue
        width = columns // strips
        begin, end = rectangle.place.begin[1], rectangle.place.end[1]
        while begin < end:
            stop = min((begin // width + 1) * width, end)
            ends = [
                (first, column, *rest)
                for (first, _, *rest), column in zip(rectangle.place, (begin, stop), strict=True)
            ]
            yield rectangle.within(Rectangle(*ends))
            begin = stop


# ---- Check that rectangles cover a tensor --------------------------------------------------------
#
# A set of rectangles covers a tensor if every element is in exactly one of them.


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
    full = Rectangle.at((0,) * len(shape), shape)
    parts = [rectangle for rectangle in rectangles if rectangle.numel]
    if _make_up(full, parts):
        return
    if len(parts) > _MOST_NAMED:
        raise CheckpointError(
            f"{name!r}: the {len(parts)} rectangles {doing} do not cover every element exactly once"
        )
    uncovered = [full] if full.numel else []
    for rectangle in sorted(parts):
        overlaps = [(free, free.common(rectangle)) for free in uncovered]
        if sum(common.numel for _, common in overlaps) < rectangle.numel:
            beyond = full.common(rectangle) != rectangle
            problem = (
                f"is outside the tensor of shape {tuple(shape)}"
                if beyond
                else "overlaps another one"
            )
            raise CheckpointError(f"{name!r}: of the rectangles {doing}, {rectangle} {problem}")
        uncovered = [
            remainder
            for free, common in overlaps
            for remainder in (free.around(common) if common.numel else (free,))
        ]
    if uncovered:
        covered = full.numel - sum(rectangle.numel for rectangle in uncovered)
        raise CheckpointError(
            f"{name!r}: the rectangles {doing} cover {covered} of {full.numel} elements; "
            f"{uncovered[0]} is not covered"
        )


def _make_up(full: Rectangle, parts: Sequence[Rectangle]) -> bool:
    """Return True if the rectangles ``parts`` cover ``full``, each element exactly once.

    No rectangle may reach beyond it. The cost is linear in the number of rectangles.

    The number of rectangles that contain an element is a function on the grid. It is determined by
    its mixed differences, which are zero except at corners. Therefore the corners of the
    rectangles, with their signs, must be those of ``full``.
    """
    cut = [
        dim
        for dim, bounds in enumerate(zip(*full, strict=True))
        if any((part.begin[dim], part.end[dim]) != bounds for part in parts)
    ]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[Shape] = Counter()
    for rectangle, sign in [*((part, 1) for part in parts), *([(full, -1)] if full.numel else [])]:
        for ends in product((0, 1), repeat=len(cut)):
            corners[tuple(rectangle[end][dim] for end, dim in zip(ends, cut, strict=True))] += (
                sign * (-1) ** sum(ends)
            )
    return not any(corners.values())


# ---- Rectangles of the full tensors on all ranks: check of coverage and choice of writers --------


class Held(NamedTuple):
    """A rectangle of the full tensor ``name``, which is ``entry``; without its values."""

    name: str
    entry: TensorEntry
    place: Rectangle

    @classmethod
    def of(cls, one: LocalRectangle) -> Held:
        """Return the description of ``one``."""
        return cls(
            one.name, TensorEntry(shape=tuple(one.full_shape), dtype=one.values.dtype), one.place
        )

    @property
    def num_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return self.place.numel * self.entry.dtype.itemsize


def check_held(ranks: Sequence[Iterable[Held]], doing: str) -> dict[str, TensorEntry]:
    """Check that the ranks' rectangles cover every tensor, and agree on shapes and dtypes.

    The same rectangle on several ranks counts once.

    Args:
        ranks: Rectangles that each rank holds.
        doing: Purpose, for the message: ``"to save"``.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: The ranks disagree, or a tensor is not covered. The message names the
            tensor, and the ranks or the region.
    """
    first_seen: dict[str, tuple[TensorEntry, int]] = {}
    by_name: dict[str, set[Rectangle]] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            entry, first = first_seen.setdefault(item.name, (item.entry, rank))
            if entry != item.entry:
                raise CheckpointError(
                    f"{item.name!r} is {entry.dtype} of full shape {entry.shape} on rank {first}, "
                    f"but {item.entry.dtype} of {item.entry.shape} on rank {rank}"
                )
            by_name.setdefault(item.name, set()).add(item.place)
    for name, places in by_name.items():
        check_cover(name, first_seen[name][0].shape, places, doing)
    return {name: entry for name, (entry, _) in first_seen.items()}


def choose_writers(ranks: Sequence[Iterable[Held]]) -> list[set[tuple[str, Rectangle]]]:
    """Return for each rank the rectangles that it writes, by name and position.

    One of the ranks that hold a rectangle writes it, and all ranks write about the same amount. The
    function is pure, so that all ranks compute the same result.
    """
    holders: dict[tuple[str, Rectangle], list[int]] = {}
    sizes: dict[tuple[str, Rectangle], int] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            holders.setdefault((item.name, item.place), []).append(rank)
            sizes[item.name, item.place] = item.num_bytes
    shares: list[set[tuple[str, Rectangle]]] = [set() for _ in ranks]
    load = [0] * len(ranks)
    # Rectangles with only one holder are assigned first.
    for key in sorted(holders, key=lambda key: (len({*holders[key]}), -sizes[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        shares[rank].add(key)
        load[rank] += sizes[key]
    return shares
