"""The global gradient norm: every parameter counted once, wherever its pieces live."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.world.mesh import Group

__all__ = ["global_norm"]


def global_norm(gradients: Iterable[Tensor], *, group: Group, device: torch.device) -> Tensor:
    """2-norm over all ranks of ``group`` of the gradients that this rank counts.

    Args:
        gradients: Local gradients; a replicated one must be given by exactly one rank of the group.
        group: The ranks of one replica.
        device: Where the result lives.

    Returns:
        0-dimensional float32 tensor, equal on every rank.
    """
    local = list(gradients)
    square = torch.zeros((), dtype=torch.float64, device=device)
    if local:
        square += torch.nn.utils.get_total_norm(local).to(torch.float64) ** 2
    if group.size > 1:
        dist.all_reduce(square, group=group.handle)
    return square.sqrt().to(torch.float32)
