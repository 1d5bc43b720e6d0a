"""Batches that the replicas of a layout read, joined to those of one process, and read again by other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ptdp.engine.batch import merge_outputs
from lightning_ptdp.nested import Nested, batch_size

__all__ = ["Captured", "Replay", "chain_batches", "join_batches"]


@dataclass(kw_only=True)
class Captured:
    """Batches of one replica.

    Attributes:
        lists: ("train", epoch) or ("validation", loader) -> batches.
        length: Batches in a whole epoch of training; None if the loader has no length.
        parts: Batches that make one of the layout.
    """

    lists: dict[tuple[str, int], list[Nested]] = field(default_factory=dict)
    length: int | None = None
    parts: int = 1


def join_batches(replicas: Sequence[Captured]) -> Captured:
    """Return batches with the samples of all replicas.

    Raises:
        ValueError: They cannot be joined.
    """
    lists = {key: [_join(parts) for parts in _side_by_side(replicas, key)] for key in replicas[0].lists}
    return Captured(lists=lists, length=replicas[0].length)


def chain_batches(replicas: Sequence[Captured]) -> Captured:
    """Return the batches of all replicas one after the other."""
    lists = {key: [batch for parts in _side_by_side(replicas, key) for batch in parts] for key in replicas[0].lists}
    length = replicas[0].length
    return Captured(lists=lists, length=None if length is None else length * len(replicas), parts=len(replicas))


class Replay:
    """A loader of captured batches.

    Args:
        batches: Returns those of an epoch.
        length: Their number; None if it is not known.
    """

    def __init__(self, batches: Callable[[], Iterable[Nested]], length: Any) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length  # None is a TypeError, as it is for any loader without a length

    def __iter__(self) -> Iterator[Nested]:
        return iter(self._batches())


def _side_by_side(replicas: Sequence[Captured], key: tuple[str, int]) -> Iterator[tuple[Nested, ...]]:
    return zip(*(replica.lists.get(key, ()) for replica in replicas), strict=False)


def _join(parts: Sequence[Nested]) -> Nested:
    if len(parts) == 1:
        return parts[0]
    sizes = [batch_size(part) for part in parts]
    try:
        whole = merge_outputs(parts, sizes, sizes)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if batch_size(whole) != sum(sizes):
        raise ValueError("they hold something else than tensors with the samples along dimension 0")
    return whole
