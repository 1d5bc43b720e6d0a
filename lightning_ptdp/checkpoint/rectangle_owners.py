"""Rectangles of the full tensors on all ranks: check of coverage and choice of writers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.coverage import check_cover
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.parameters.rectangle import Rectangle

__all__ = ["Held", "check_held", "share_out"]


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
    known: dict[str, tuple[TensorEntry, int]] = {}
    found: dict[str, set[Rectangle]] = {}
    for rank, one in ((rank, one) for rank, held in enumerate(ranks) for one in held):
        entry, first = known.setdefault(one.name, (one.entry, rank))
        if entry != one.entry:
            raise CheckpointError(
                f"{one.name!r} is {entry.dtype} of full shape {entry.shape} on rank {first}, but "
                f"{one.entry.dtype} of {one.entry.shape} on rank {rank}"
            )
        found.setdefault(one.name, set()).add(one.place)
    for name, rectangles in found.items():
        check_cover(name, known[name][0].shape, rectangles, doing)
    return {name: entry for name, (entry, _) in known.items()}


def share_out(ranks: Sequence[Iterable[Held]]) -> list[set[tuple[str, Rectangle]]]:
    """Return for each rank the rectangles that it writes, by name and position.

    One of the ranks that hold a rectangle writes it, and all ranks write about the same amount. The
    function is pure, so that all ranks compute the same result.
    """
    holders: dict[tuple[str, Rectangle], list[int]] = {}
    sizes: dict[tuple[str, Rectangle], int] = {}
    for rank, one in ((rank, one) for rank, held in enumerate(ranks) for one in held):
        holders.setdefault((one.name, one.place), []).append(rank)
        sizes[one.name, one.place] = one.num_bytes
    shares: list[set[tuple[str, Rectangle]]] = [set() for _ in ranks]
    load = [0] * len(ranks)
    # Rectangles with only one holder are assigned first.
    for what in sorted(holders, key=lambda what: (len({*holders[what]}), -sizes[what], what)):
        rank = min(holders[what], key=lambda rank: (load[rank], rank))
        shares[rank].add(what)
        load[rank] += sizes[what]
    return shares
