"""Parts of a full tensor on the members of the tensor group: some of its features, or of its
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ptdp.parameters.sharding import Piece, Shape, Sharding

__all__ = ["VocabularyRange", "shard_columns", "shard_twice", "shard_vocabulary"]


@dataclass(frozen=True, kw_only=True)
class VocabularyRange:
    """The token ids of one member of the tensor group: [start, stop), followed by padding up to
    ``rows``.

    Attributes:
        size: V, number of tokens of the whole vocabulary.
        parts: t, members of the group.
        index: This member.
    """

    size: int
    parts: int = 1
    index: int = 0

    @property
    def rows(self) -> int:
        """Local rows, padding included; equal on all members: ceil(V / t)."""
        return -(-self.size // self.parts)

    @property
    def padded(self) -> int:
        """Rows of all members together."""
        return self.rows * self.parts

    @property
    def start(self) -> int:
        """First token id of this member."""
        return min(self.index * self.rows, self.size)

    @property
    def stop(self) -> int:
        """One past the last token id of this member."""
        return min(self.start + self.rows, self.size)

    @property
    def count(self) -> int:
        """Local rows that are tokens; the others are padding."""
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
) -> Sharding:
    """Split the output features, made of ``parts`` that are each split on their own, over ``size``
    members; this is ``index``.

    Args:
        shape: Of the full weight or bias.
        parts: Output features of each part.
        size: Members of the group.
        index: This member.
        copies: How many neighbouring members hold the same slice of each part: with c copies it is
            cut into size / c slices.
        dim: Where the output features are.
        axis: Whose group it is.
        partial: Axes over which its gradient is a sum.
    """
    copies = copies if copies is not None else (1,) * len(parts)
    assert sum(parts) == shape[dim], (tuple(parts), tuple(shape))
    assert all(
        size % c == 0 and part % (size // c) == 0 for part, c in zip(parts, copies, strict=True)
    ), (parts, copies, size)
    pieces, local, full = [], 0, 0
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
        local, full = local + extent, full + part
    return Sharding(
        full_shape=tuple(shape),
        local_shape=_at(dim, local, shape),
        pieces=tuple(pieces),
        sharded=(axis,),
        partial=partial,
    )


def shard_twice(one: Sharding, other: Sharding) -> Sharding:
    """Split along two dimensions: what both of two shardings of a tensor along one each leave
    here."""
    assert one.full_shape == other.full_shape and not one.copies and not other.copies
    pieces = [
        Piece(
            local=tuple(map(sum, zip(a.local, b.local, strict=True))),
            full=tuple(map(sum, zip(a.full, b.full, strict=True))),
            size=tuple(map(min, zip(a.size, b.size, strict=True))),
        )
        for a in one.pieces
        for b in other.pieces
    ]
    return Sharding(
        full_shape=one.full_shape,
        local_shape=tuple(map(min, zip(one.local_shape, other.local_shape, strict=True))),
        pieces=tuple(pieces),
        sharded=(*one.sharded, *other.sharded),
        partial=(*one.partial, *other.partial),
    )


def shard_vocabulary(shape: Sequence[int], vocabulary: VocabularyRange) -> Sharding:
    """Split dimension 0 by token; a member may have padding rows, or nothing else."""
    assert shape[0] == vocabulary.size, (tuple(shape), vocabulary)
    rest = tuple(shape[1:])
    origin = (0,) * len(rest)
    piece = Piece(
        local=(0, *origin), full=(vocabulary.start, *origin), size=(vocabulary.count, *rest)
    )
    return Sharding(
        full_shape=tuple(shape),
        local_shape=(vocabulary.rows, *rest),
        pieces=(piece,) if vocabulary.count else (),
        sharded=("tensor",),
    )


def _at(dim: int, value: int, shape: Sequence[int]) -> Shape:
    """``shape`` with ``value`` in dimension ``dim``."""
    return (*shape[:dim], value, *shape[dim + 1 :])
