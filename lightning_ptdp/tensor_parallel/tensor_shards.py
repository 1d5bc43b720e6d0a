"""Shards of a full tensor on the ranks of a group, by features or by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.parameters.placement import Piece, Placement, Shape


@dataclass(frozen=True, kw_only=True)
class VocabularyRange:
    """Token ids of one tensor-parallel rank: [start, stop), then padding up to ``rows``.

    Attributes:
        size: V, number of tokens of the full vocabulary.
        parts: t, size of the group.
        index: Rank in the group.
    """

    size: int
    parts: int = 1
    index: int = 0

    @property
    def rows(self) -> int:
        """Return the number of local rows, padding included; equal on all ranks: ceil(V / t)."""
        return -(-self.size // self.parts)

    @property
    def padded(self) -> int:
        """Return the number of rows of all ranks together."""
        return self.rows * self.parts

    @property
    def start(self) -> int:
        """Return the first token id of this rank."""
        return min(self.index * self.rows, self.size)

    @property
    def stop(self) -> int:
        """Return one past the last token id of this rank."""
        return min(self.start + self.rows, self.size)

    @property
    def count(self) -> int:
        """Return the number of local rows that are tokens; the others are padding."""
        return self.stop - self.start


def shard_columns(
    shape: Sequence[int],
    *,
    parts: Sequence[int],
    size: int,
    index: int,
    copies: Sequence[int] | None = None,
    dim: int = 0,
    axis: str = "tensor",
    partial: tuple[str, ...] = (),
) -> Placement:
    """Split output features made of ``parts``, each part on its own, over ``size`` ranks.

    Args:
        shape: Shape of the full weight or bias.
        parts: Output features of each part.
        size: Size of the group.
        index: Rank in the group.
        copies: Number of adjacent ranks that hold the same slice, for each part. With c copies a
            part is cut into size / c slices.
        dim: Dimension of the output features.
        axis: Axis of the group.
        partial: Axes over which the parameter's gradient must be summed.
    """
    copies = copies if copies is not None else (1,) * len(parts)
    assert sum(parts) == shape[dim], (tuple(parts), tuple(shape))
    assert all(
        size % c == 0 and part % (size // c) == 0 for part, c in zip(parts, copies, strict=True)
    ), (parts, copies, size)
    pieces = []
    local = 0
    full = 0
    for part, c in zip(parts, copies, strict=True):
        extent = part // (size // c)
        pieces.append(
            Piece(
                local=_at(dim, local, (0,) * len(shape)),
                full=_at(dim, full + index // c * extent, (0,) * len(shape)),
                size=_at(dim, extent, shape),
                copies=c,
                copy=index % c,
            )
        )
        local = local + extent
        full = full + part
    return Placement(
        full_shape=tuple(shape),
        local_shape=_at(dim, local, shape),
        pieces=tuple(pieces),
        sharded=(axis,),
        partial=partial,
    )


def shard_twice(one: Placement, other: Placement) -> Placement:
    """Intersect two placements of a tensor along different dimensions."""
    assert one.full_shape == other.full_shape and not one.has_copies and not other.has_copies
    pieces = [
        Piece(
            local=tuple(map(sum, zip(a.local, b.local, strict=True))),
            full=tuple(map(sum, zip(a.full, b.full, strict=True))),
            size=tuple(map(min, zip(a.size, b.size, strict=True))),
        )
        for a in one.pieces
        for b in other.pieces
    ]
    return Placement(
        full_shape=one.full_shape,
        local_shape=tuple(map(min, zip(one.local_shape, other.local_shape, strict=True))),
        pieces=tuple(pieces),
        sharded=(*one.sharded, *other.sharded),
        partial=(*one.partial, *other.partial),
    )


def shard_vocabulary(shape: Sequence[int], vocabulary: VocabularyRange) -> Placement:
    """Split dimension 0 by token; a rank may have padding rows, or only padding rows."""
    assert shape[0] == vocabulary.size, (tuple(shape), vocabulary)
    row_shape = tuple(shape[1:])
    origin = (0,) * len(row_shape)
    piece = Piece(
        local=(0, *origin), full=(vocabulary.start, *origin), size=(vocabulary.count, *row_shape)
    )
    return Placement(
        full_shape=tuple(shape),
        local_shape=(vocabulary.rows, *row_shape),
        pieces=(piece,) if vocabulary.count else (),
        sharded=("tensor",),
    )


def _at(dim: int, value: int, shape: Sequence[int]) -> Shape:
    """Return ``shape`` with ``value`` in dimension ``dim``."""
    return (*shape[:dim], value, *shape[dim + 1 :])
