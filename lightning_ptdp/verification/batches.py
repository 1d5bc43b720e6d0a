"""Batches that the replicas of a layout read, joined to those of one process, and read again by other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ptdp.engine.batch import merge_outputs
from lightning_ptdp.nested import Nested, batch_size

__all__ = ["Captured", "Replay"]


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
    def of_one_process(cls, replicas: Sequence[Captured], *, joined: bool) -> Captured:
        """Return the batches of all replicas, each joined to one, or one after the other.

        Raises:
            ValueError: They cannot be joined.
        """
        length = replicas[0].length
        return cls(
            train=_combined([replica.train for replica in replicas], joined=joined),
            validation=_combined([replica.validation for replica in replicas], joined=joined),
            length=length if joined or length is None else length * len(replicas),
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


def _combined(replicas: Sequence[Sequence[Sequence[Nested]]], *, joined: bool) -> list[list[Nested]]:
    lists = zip(*replicas, strict=False)
    return [[batch for parts in zip(*each, strict=False) for batch in ([_join(parts)] if joined else parts)] for each in lists]


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
