"""Placement of a parameter: the only description of what a rank holds of it.

Initialization, gradients, norms, checkpoints, exports and the summary read it. A placement lists
the rectangles that the local and the full tensor have in common. Usually there is one. A fused
matrix [q | k | v] split over ranks has one rectangle per part, and a padded vocabulary has local
rows that no rectangle covers::

    full (q0 q1 | k0 k1 | v0 v1)          rank 0 of 2 holds (q0 | k0 | v0), rank 1 (q1 | k1 | v1)

Kinds of modules make it, ``parallelize`` completes it by the facts about the other ranks, and a
sharded optimizer cuts a flat range out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.world.mesh import Group

Shape = tuple[int, ...]

Sum = tuple[Rectangle | None, Group]
"""Part of a local tensor (None: all) whose gradient is a sum, and the group of the sum."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rectangle that the local and the full tensor have in common.

    Attributes:
        local: Offset in the local tensor.
        full: Offset in the full tensor.
        size: Extent.
        copies: Number of members of the tensor group that hold this rectangle, if there are fewer
            key/value heads than members. Each member's gradient is one term of the sum over these
            members.
        copy: Index of this member among them; the first one counts the rectangle in norms.
    """

    local: Shape
    full: Shape
    size: Shape
    copies: int = 1
    copy: int = 0

    @property
    def in_local(self) -> Rectangle:
        """Return the rectangle in the local tensor."""
        return Rectangle.at(self.local, self.size)

    @property
    def in_full(self) -> Rectangle:
        """Return the rectangle in the full tensor."""
        return Rectangle.at(self.full, self.size)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Place of one local tensor in its full tensor, and of its copies on other ranks.

    On an axis that is neither sharded nor partial, the tensor is replicated: the ranks hold the
    same values, with the same gradient.

    Attributes:
        full_shape: Shape of the full tensor.
        local_shape: Shape of the local tensor.
        pieces: The local rectangles. Local elements outside of all rectangles are padding: always
            zero, never saved.
        sharded: Names of the axes whose ranks hold different pieces.
        partial: Names of the axes whose ranks hold identical copies of the tensor, but each only
            one term of its gradient. An example is a norm's weight under sequence parallelism,
            where each rank sees a slice of the sequence. "pipeline" is among them if several
            pipeline ranks hold the tensor (tied weights, modules kept by every stage).
        data_axes: Those of the partial axes whose ranks read different samples or tokens.
        sums: Groups of the sums over the other partial axes, and over the copies of pieces; that
            over pipeline ranks is the last.
        flat: Range [start, stop) of the flattened local tensor that this rank holds of it, a part
            of a bucket that is sharded over replicas; None: all of it.
        first_in_replica: Whether this rank is the first of the ranks that hold a copy of it and
            read the same data.
        first_in_block: Whether this rank is the first of the ranks of its block (``Axis.within``)
            that hold a copy of it; for a flat range, the first of all ranks that read other data.
    """

    full_shape: Shape
    local_shape: Shape
    pieces: tuple[Piece, ...]
    sharded: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    sums: tuple[Sum, ...] = ()
    flat: tuple[int, int] | None = None
    first_in_replica: bool = True
    first_in_block: bool = True

    def __post_init__(self) -> None:
        for piece in self.pieces:
            for rectangle, shape in (
                (piece.in_local, self.local_shape),
                (piece.in_full, self.full_shape),
            ):
                bounds = Rectangle.at((0,) * len(shape), shape)
                assert bounds.common(rectangle) == rectangle, (
                    f"{rectangle} is outside the shape {shape}"
                )

    @classmethod
    def replicated(cls, shape: Sequence[int], *, partial: tuple[str, ...] = ()) -> Placement:
        """Return the placement of a tensor of which every rank holds all."""
        size = tuple(shape)
        origin = (0,) * len(size)
        return cls(
            full_shape=size,
            local_shape=size,
            pieces=(Piece(local=origin, full=origin, size=size),),
            partial=partial,
        )

    def flattened(self, start: int, stop: int, *, first: bool = True) -> Placement:
        """Return the placement of a range of the flattened local tensor.

        ``first`` tells whether this rank is the first of those that hold this range.
        """
        return replace(self, flat=(start, stop), first_in_block=first)

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def held_shape(self) -> Shape:
        """Return the shape of the tensor that this rank holds: (elements,) of a flat range."""
        return self.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def is_full(self) -> bool:
        """Return True if the local tensor is the full one."""
        return self.local_shape == self.full_shape

    @property
    def divided_dims(self) -> frozenset[int]:
        """Return the dimensions along which the local tensor is shorter than the full one."""
        sizes = enumerate(zip(self.local_shape, self.full_shape, strict=True))
        return frozenset(dim for dim, (local, full) in sizes if local != full)

    @property
    def tied(self) -> bool:
        """Return True if several pipeline ranks hold it."""
        return "pipeline" in self.partial

    @property
    def counted(self) -> bool:
        """Return True if this rank counts it in norms and totals, for all ranks that hold it."""
        return self.first_in_replica and self.first_in_block

    @property
    def num_padding(self) -> int:
        """Return the number of local elements that no piece covers."""
        return math.prod(self.local_shape) - sum(piece.in_local.numel for piece in self.pieces)

    @property
    def num_unrepeated(self) -> int:
        """Return the number of local elements, not counting padding and repeated copies.

        A copy counts as repeated if an earlier member of the group holds it too.
        """
        return sum(piece.in_local.numel for piece in self.pieces if piece.copy == 0)

    @property
    def has_copies(self) -> bool:
        """Return True if several members of the tensor group hold the same piece."""
        return any(piece.copies > 1 for piece in self.pieces)

    # ---- views of a tensor of the held shape -----------------------------------------------------

    def held(self, values: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Yield (offset in the full tensor, view of ``values``) of every rectangle."""
        for piece in self.pieces:
            if 0 not in piece.size or 0 in self.full_shape:
                for offset, view in self._within(piece.in_local, values):
                    yield tuple(map(sum, zip(piece.full, offset, strict=True))), view

    def unrepeated(self, values: Tensor) -> list[Tensor]:
        """Return views of ``values`` without repeated copies.

        A copy is repeated if an earlier member holds it as well.
        """
        if not self.has_copies:
            return [values]
        rectangles = [piece.in_local for piece in self.pieces if piece.copy == 0]
        return [view for rectangle in rectangles for view in self.within(rectangle, values)]

    def within(self, where: Rectangle | None, values: Tensor) -> list[Tensor]:
        """Return the views of ``values`` inside the local rectangle ``where`` (None: all)."""
        return [values] if where is None else [view for _, view in self._within(where, values)]

    def _within(self, where: Rectangle, values: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Yield (offset within ``where``, view of ``values``) of the rectangles in ``where``."""
        if self.flat is None:
            yield (0,) * values.dim(), values[where.slices]
        else:
            yield from overlap(self.local_shape, self.flat[0], where, values)


def slice_full(full: Tensor, placement: Placement) -> Tensor:
    """Return a new tensor with the local part of ``full``; padding is zero.

    The dtype and device are those of ``full`` (meta stays meta).
    """
    assert tuple(full.shape) == placement.full_shape, (tuple(full.shape), placement.full_shape)
    make = torch.zeros if placement.num_padding else torch.empty
    local = make(placement.local_shape, dtype=full.dtype, device=full.device)
    for piece in placement.pieces:
        local[piece.in_local.slices] = full.detach()[piece.in_full.slices]
    return local


# ---- Ranges of a flattened tensor, as rectangles of the tensor -----------------------------------
#
# A range [start, stop) of a matrix in row-major order is at most three rectangles::
#
#     . . . a a a     the end of a row
#     b b b b b b     whole rows
#     b b b b b b
#     c c . . . .     the beginning of a row


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
    row_size = math.prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    while start < stop:
        index, offset = divmod(start, row_size)
        full_rows = 0 if offset else (stop - start) // row_size
        if full_rows:
            yield Rectangle.at((index, *zeros), (full_rows, *shape[1:]))
        else:
            for part in range_rectangles(shape[1:], offset, min(stop - index * row_size, row_size)):
                yield Rectangle((index, *part.begin), (index + 1, *part.end))
        start = min(stop, (index + max(full_rows, 1)) * row_size)
