"""Captured batches of a layout's replicas, to replay in one process and in other layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.engine.microbatches import merge_outputs

__all__ = ["Captured", "Replay", "combine"]


@dataclass(kw_only=True)
class Captured:
    """Batches of one replica.

    Attributes:
        lists: ("train", epoch) or ("validation", loader) -> batches.
        length: Number of batches in a whole training epoch; infinite if the loader has no length.
        parts: Number of batches that make up one batch of the layout.
    """

    lists: dict[tuple[str, int], list[Nested]] = field(default_factory=dict)
    length: float = math.inf
    parts: int = 1


def combine(replicas: Sequence[Captured], *, joined: bool) -> Captured:
    """Return the batches of all replicas, joined to one batch each or in sequence.

    Raises:
        ValueError, RuntimeError: The batches cannot be joined.
    """
    lists: dict[tuple[str, int], list[Nested]] = {}
    for key in replicas[0].lists:
        together = zip(*(replica.lists.get(key, ()) for replica in replicas), strict=False)
        lists[key] = [
            batch for parts in together for batch in ([_join(parts)] if joined else parts)
        ]
    count = 1 if joined else len(replicas)
    return Captured(lists=lists, length=replicas[0].length * count, parts=count)


@dataclass(frozen=True)
class Replay:
    """A loader of captured batches.

    Attributes:
        batches: Function that returns the batches of an epoch.
        length: Number of these batches; infinite if it is unknown.
    """

    batches: Callable[[], Iterable[Nested]]
    length: Any

    def __len__(self) -> int:
        return self.length  # Infinity raises a TypeError, like any loader without a length.

    def __iter__(self) -> Iterator[Nested]:
        return iter(self.batches())


def _join(parts: Sequence[Nested]) -> Nested:
    if len(parts) == 1:
        return parts[0]
    sizes = [batch_size(part) for part in parts]
    whole = merge_outputs(parts, sizes, sizes)
    if batch_size(whole) != sum(sizes):
        raise ValueError("they have values other than tensors with the samples along dimension 0")
    return whole
