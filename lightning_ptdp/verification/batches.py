"""Batches that the replicas of a layout read, joined to those of one process, and read again by other layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.nested import Nested, batch_size, iterate_tensors

__all__ = ["Captured", "Replay", "join"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Batches of one replica.

    Attributes:
        train: Batches of each epoch.
        validation: Batches of each validation loader.
        length: Batches in a whole epoch; None if the loader has no length.
    """

    train: Sequence[Sequence[Nested]]
    validation: Sequence[Sequence[Nested]]
    length: int | None

    @classmethod
    def joined(cls, replicas: Sequence[Captured]) -> Captured:
        """Return the batches of one process: those of all replicas, one after the other.

        Raises:
            ValueError: They cannot be joined.
        """
        return cls(
            train=_join_all([replica.train for replica in replicas]),
            validation=_join_all([replica.validation for replica in replicas]),
            length=replicas[0].length,
        )

    @classmethod
    def in_turn(cls, replicas: Sequence[Captured]) -> Captured:
        """Return the batches of one process that accumulates over the replicas' batches."""
        first, count = replicas[0], len(replicas)
        return cls(
            train=_in_turn([replica.train for replica in replicas]),
            validation=_in_turn([replica.validation for replica in replicas]),
            length=None if first.length is None else first.length * count,
        )


class Replay:
    """A loader of captured batches: those of this rank's replica, epoch by epoch.

    Args:
        trainer: Knows the rank; without several replicas all ranks read the first batches.
        replicas: Epochs of each replica.
        length: Batches in an epoch, if they have a number.
        again: Whether every epoch is the first.
    """

    def __init__(
        self, trainer: Any, replicas: Sequence[Sequence[Sequence[Nested]]], *, length: int | None, again: bool = False
    ) -> None:
        self._trainer, self._replicas, self._length, self._again = trainer, replicas, length, again
        self._epoch = 0

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the captured loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Nested]:
        epochs = self._replicas[self._trainer.strategy.distributed_sampler_kwargs["rank"]]
        epoch, self._epoch = self._epoch, 0 if self._again else self._epoch + 1
        yield from epochs[epoch] if epoch < len(epochs) else ()


def join(parts: Sequence[Nested]) -> Nested:
    """Return one batch with the samples of all ``parts``, in their order.

    Raises:
        ValueError: Something in them has other sizes, or is no tensor and differs.
    """
    sizes = [batch_size(part) for part in parts if any(tensor.dim() for tensor in iterate_tensors(part))]
    return parts[0] if len(parts) == 1 else _join(parts, sizes)


def _join(parts: Sequence[Any], sizes: Sequence[int]) -> Nested:
    first, kind = parts[0], type(parts[0])
    if isinstance(first, Tensor):
        if len({part.shape[1:] for part in parts}) == 1 and [part.shape[:1] for part in parts] == [(size,) for size in sizes]:
            return torch.cat(list(parts))
        if all(torch.equal(first, part) for part in parts):
            return first
    elif isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        named = {key: _join([part[key] for part in parts], sizes) for key in first}
        return named if kind is dict else kind(named)
    elif isinstance(first, (list, tuple)):
        if [len(part) for part in parts] == list(sizes) and not any(isinstance(item, Tensor) for item in first):
            return kind(item for part in parts for item in part)
        if len({len(part) for part in parts}) == 1:
            items = [_join(each, sizes) for each in zip(*parts, strict=True)]
            return kind(*items) if hasattr(first, "_fields") else kind(items)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        whole: Any = first
        return dataclasses.replace(whole, **{name: _join([getattr(part, name) for part in parts], sizes) for name in names})
    elif all(part == first for part in parts):
        return first
    raise ValueError(f"the replicas' batches hold a {kind.__name__} that cannot be joined")


def _join_all(replicas: Sequence[Sequence[Sequence[Nested]]]) -> list[list[Nested]]:
    return [[join(parts) for parts in zip(*lists, strict=False)] for lists in zip(*replicas, strict=False)]


def _in_turn(replicas: Sequence[Sequence[Sequence[Nested]]]) -> list[list[Nested]]:
    lists = zip(*replicas, strict=False)
    return [[batch for parts in zip(*each, strict=False) for batch in parts] for each in lists]
