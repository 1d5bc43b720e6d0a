"""Module buffers that each replica computes from its own data.

Examples are running statistics and codebooks.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.data_parallel.gradient_sums import flattened
from lightning_ptdp.world.mesh import Group


class ReplicaBuffers:
    """The buffers of this rank's part of a module, broadcast from the first replica.

    torch's DDP does the same. The shapes are those at construction. A buffer that is later bound to
    a tensor of another form, possibly on one replica only, is left out of the broadcast. Its first
    tensor takes its place there.

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

    def broadcast(self) -> None:
        """Give all ranks the values of the first one; collective."""
        if self._group.size == 1 or not self._places:
            return
        with torch.no_grad():
            buffers = [_current(registry.get(key), first) for registry, key, first in self._places]
            for _, run in groupby(buffers, key=lambda buffer: (buffer.dtype, buffer.device)):
                _broadcast(list(run), self._group)


def _current(buffer: Tensor | None, first: Tensor) -> Tensor:
    if buffer is None:
        return first
    form = (buffer.shape, buffer.dtype, buffer.device)
    return buffer if form == (first.shape, first.dtype, first.device) else first


def _broadcast(buffers: list[Tensor], group: Group) -> None:
    flat, values = flattened(buffers)
    # As bytes, because no backend supports every dtype.
    dist.broadcast(flat.view(torch.uint8), group.ranks[0], group=group.handle)
    if group.rank:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
