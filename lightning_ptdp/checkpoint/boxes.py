"""What a rank holds of the full tensors, as rectangles: the only thing that storage knows about shardings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = ["Box", "Placed", "Tensors", "boxes_of"]


class Placed(Protocol):
    """How a local tensor sits in its full one: a ``Sharding``, or what a sharded optimizer has of one."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""

    def boxes(self, local: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(offset in the full tensor, view of ``local``) of every rectangle that is here."""


Tensors = Mapping[str, tuple[torch.Tensor, Placed]]


@dataclass(frozen=True, kw_only=True)
class Box:
    """One rectangle of one full tensor.

    Attributes:
        name: Global name of the full tensor.
        full_shape: Shape of the full tensor.
        offset: Where the rectangle begins in the full tensor.
        values: A view of the local tensor with the rectangle's extent: writing to it writes to the local tensor.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


def boxes_of(tensors: Tensors) -> list[Box]:
    """The rectangles of local tensors; local elements that no piece covers (padding) are in none.

    Raises:
        CheckpointError: A tensor does not have its sharding's local shape.
    """
    boxes = []
    for name, (tensor, sharding) in tensors.items():
        if tuple(tensor.shape) != sharding.local_shape:
            raise CheckpointError(
                f"{name!r} has the local shape {tuple(tensor.shape)}, but its sharding says {sharding.local_shape}"
            )
        for offset, values in sharding.boxes(tensor.detach()):
            boxes.append(Box(name=name, full_shape=sharding.full_shape, offset=offset, values=values))
    return boxes
