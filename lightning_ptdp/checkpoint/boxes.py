"""What a rank holds of the full tensors, as rectangles: the only thing that storage knows about shardings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.tensor_parallel.sharding import Sharding

__all__ = ["Box", "Tensors", "boxes_of"]

Tensors = Mapping[str, tuple[torch.Tensor, Sharding]]


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
        for piece in sharding.pieces:
            if 0 in piece.size and 0 not in sharding.full_shape:
                continue
            values = tensor.detach()[piece.local_slices]
            boxes.append(Box(name=name, full_shape=sharding.full_shape, offset=piece.full, values=values))
    return boxes
