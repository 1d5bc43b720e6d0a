"""Local part of a full tensor: one record for all parts of the package.

Initialization, checkpoints, norms and the summary read it. A sharding is a list of rectangles.
Usually there is one rectangle. A fused matrix [q | k | v] split over ranks has one rectangle per
part, and a padded vocabulary has local rows that no rectangle covers::

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
    def local_slices(self) -> tuple[slice, ...]:
        """Return the index of the rectangle in the local tensor."""
        return _slices(self.local, self.size)

    @property
    def full_slices(self) -> tuple[slice, ...]:
        """Return the index of the rectangle in the full tensor."""
        return _slices(self.full, self.size)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Position of one local tensor in its full tensor.

    Attributes:
        full_shape: Shape of the full tensor.
        local_shape: Shape of the local tensor.
        pieces: The local rectangles. Local elements outside of all rectangles are padding: always
            zero, never saved.
        sharded: Names of the axes whose ranks hold different pieces.
        partial: Names of the axes whose ranks hold it alike, each with one term of the gradient's
            sum (a norm's weight under sequence parallelism, of which each rank saw a slice of the
            sequence). On all other axes it is replicated: alike, with the same gradient.
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
        """Return the record of a tensor that every rank holds whole."""
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
        """Return the number of local elements that no piece covers."""
        return math.prod(self.local_shape) - sum(math.prod(piece.size) for piece in self.pieces)

    @property
    def num_counted(self) -> int:
        """Return the number of local elements without padding and repeated copies.

        A copy is repeated if an earlier member holds it as well."""
        return sum(math.prod(piece.size) for piece in self.pieces if piece.copy == 0)

    @property
    def copies(self) -> tuple[int, ...]:
        """Return the numbers of copies, above one, that pieces have."""
        return tuple(sorted({piece.copies for piece in self.pieces if piece.copies > 1}))

    def held(self, local: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Yield (offset in the full tensor, view of ``local``) of every local rectangle."""
        for piece in self.pieces:
            if 0 not in piece.size or 0 in self.full_shape:
                yield piece.full, local[piece.local_slices]

    def counted(self, local: Tensor) -> list[Tensor]:
        """Return views of a tensor of the local shape, without repeated copies.

        A copy is repeated if an earlier member holds it as well."""
        if not self.copies:
            return [local]
        return [local[piece.local_slices] for piece in self.pieces if piece.copy == 0]


def slice_full(full: Tensor, sharding: Sharding) -> Tensor:
    """Return a new tensor with the local part of ``full``; padding is zero.

    The dtype and device are those of ``full`` (meta stays meta)."""
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
