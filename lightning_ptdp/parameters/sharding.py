"""Which part of a full tensor is here: one record, read by initialization, checkpoints, norms and
the summary.

A sharding is a list of rectangles. One rectangle is the usual case; a fused matrix [q | k | v]
split over ranks has one a part, and a padded vocabulary has local rows that no rectangle covers::

    full (q0 q1 | k0 k1 | v0 v1)          rank 0 of 2 holds (q0 | k0 | v0), rank 1 (q1 | k1 | v1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Piece", "Shape", "Sharding", "slice_full"]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle that the local and the full tensor have in common.

    Attributes:
        local: Offset in the local tensor.
        full: Offset in the full tensor.
        size: Extent.
        copies: Members of the tensor group that hold this rectangle, where there are fewer heads of
            keys and values than members. Each member's gradient of it is a part of the sum over
            these.
        copy: Which of them this is; the first one counts the rectangle in norms.
    """

    local: Shape
    full: Shape
    size: Shape
    copies: int = 1
    copy: int = 0

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the local tensor."""
        return _slices(self.local, self.size)

    @property
    def full_slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the full tensor."""
        return _slices(self.full, self.size)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Position of one local tensor in its full one.

    Attributes:
        full_shape: Shape of the full tensor.
        local_shape: Shape of the local tensor.
        pieces: The rectangles that are here. Local elements in none of them are padding: always
            zero, never saved.
        sharded: Names of the axes whose ranks hold different pieces.
        partial: Names of the axes whose ranks hold it alike, each with one term of the gradient's
            sum (a norm's weight under sequence parallelism: its rank saw a slice of the sequence).
            On all other axes it is replicated: alike, with the same gradient.
    """

    full_shape: Shape
    local_shape: Shape
    pieces: tuple[Piece, ...]
    sharded: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for piece in self.pieces:
            assert _inside(piece.local, piece.size, self.local_shape), (
                f"{piece} is outside of the local shape {self.local_shape}"
            )
            assert _inside(piece.full, piece.size, self.full_shape), (
                f"{piece} is outside of the full shape {self.full_shape}"
            )

    @classmethod
    def replicated(cls, shape: Sequence[int], *, partial: tuple[str, ...] = ()) -> Sharding:
        """The record of a tensor that every rank holds whole."""
        size = tuple(shape)
        origin = (0,) * len(size)
        return cls(
            full_shape=size,
            local_shape=size,
            pieces=(Piece(local=origin, full=origin, size=size),),
            partial=partial,
        )

    @property
    def num_padding(self) -> int:
        """Local elements that no piece covers."""
        return math.prod(self.local_shape) - sum(math.prod(piece.size) for piece in self.pieces)

    @property
    def num_counted(self) -> int:
        """Local elements without padding, and without what an earlier member holds as well."""
        return sum(math.prod(piece.size) for piece in self.pieces if piece.copy == 0)

    @property
    def copies(self) -> tuple[int, ...]:
        """The numbers of copies, above one, that pieces have."""
        return tuple(sorted({piece.copies for piece in self.pieces if piece.copies > 1}))

    def held(self, local: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """(offset in the full tensor, view of ``local``) of every rectangle that is here."""
        for piece in self.pieces:
            if 0 not in piece.size or 0 in self.full_shape:
                yield piece.full, local[piece.local_slices]

    def counted(self, local: Tensor) -> list[Tensor]:
        """Views of a tensor of the local shape that together leave out what an earlier member holds
        as well."""
        if not self.copies:
            return [local]
        return [local[piece.local_slices] for piece in self.pieces if piece.copy == 0]


def slice_full(full: Tensor, sharding: Sharding) -> Tensor:
    """A new tensor with the local part of ``full``, same dtype and device (meta stays meta);
    padding is zero."""
    assert tuple(full.shape) == sharding.full_shape, (tuple(full.shape), sharding.full_shape)
    make = torch.zeros if sharding.num_padding else torch.empty
    local = make(sharding.local_shape, dtype=full.dtype, device=full.device)
    for piece in sharding.pieces:
        local[piece.local_slices] = full.detach()[piece.full_slices]
    return local


def _slices(offset: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))


def _inside(offset: Shape, size: Shape, shape: Shape) -> bool:
    bounds = zip(offset, size, shape, strict=True)
    return all(
        min(start, extent) >= 0 and start + extent <= limit for start, extent, limit in bounds
    )
