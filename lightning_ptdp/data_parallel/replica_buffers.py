"""Module buffers that each replica computes from its own data.

Examples are running statistics and codebooks.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.data_parallel.gradient_sums import flattened
from lightning_ptdp.world.mesh import Group

Place = tuple[dict[str, Tensor | None], str, Tensor]
"""The buffers of a module, the name of one of them, and its tensor."""


class ReplicaBuffers:
    """The buffers of this rank's part of a module, broadcast from the first replica.

    torch's DDP does the same. The shapes are those at construction. A buffer that is later bound to
    a tensor of another form, possibly on one replica only, is left out of the broadcast. Its first
    tensor takes its place there. An expanded tensor is a constant, until the step binds another one.

    Args:
        module: This rank's part of the LightningModule.
        group: The ranks that hold the same part and read different samples or tokens.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._group = group
        places = {
            id(buffer): (child._buffers, key, buffer)
            for child in module.modules()
            for key, buffer in child._buffers.items()
            if buffer is not None and buffer.layout is torch.strided and buffer.numel()
        }
        self._places = sorted(places.values(), key=lambda place: str(place[2].dtype))
        self._constants = {buffer for _, _, buffer in self._places if overlaps(buffer)}

    def broadcast(self) -> None:
        """Give all ranks the values of the first one; collective."""
        if self._group.size == 1 or not self._places:
            return
        with torch.no_grad():
            places = [
                (registry, key, _current(registry.get(key), first))
                for registry, key, first in self._places
            ]
            for _, run in groupby(places, key=lambda place: (place[2].dtype, place[2].device)):
                _broadcast(list(run), self._group, self._constants)


def _current(buffer: Tensor | None, first: Tensor) -> Tensor:
    if buffer is None:
        return first
    form = (buffer.shape, buffer.dtype, buffer.device)
    return buffer if form == (first.shape, first.dtype, first.device) else first


def _broadcast(places: list[Place], group: Group, constants: Set[Tensor]) -> None:
    flat, values = flattened([buffer for _, _, buffer in places])
    # As bytes, because no backend supports every dtype.
    dist.broadcast(flat.view(torch.uint8), group.ranks[0], group=group.handle)
    if not group.rank:
        return
    for (registry, key, buffer), value in zip(places, values, strict=True):
        if buffer in constants:
            continue
        # Lightning validates in inference mode, except with gloo. Tensors made there cannot be
        # written to afterwards.
        if not overlaps(buffer) and not buffer.is_inference():
            buffer.copy_(value)
        elif registry.get(key) is buffer:
            registry[key] = value.clone()


def overlaps(tensor: Tensor) -> bool:
    """Return True if elements of an expanded tensor share memory."""
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
