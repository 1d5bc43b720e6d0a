"""Sums of gradients over other ranks than the replicas: of parts that several ranks hold alike, each with one term; and their norm.

The former are parameters that saw a slice of the sequence, tied ones of other stages, and, with fewer heads of keys and values than ranks,
the heads that several ranks hold beside others of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.world.mesh import Group

__all__ = ["add_up", "global_norm"]

_LONG = 2**16


def add_up(parts: Iterable[tuple[Tensor, Group]]) -> None:
    """Sum tensors over their groups, in place; one message a group and dtype.

    The ranks of a group must give it the same parts, in the same order among themselves and among those of groups that they share.
    """
    messages: dict[tuple[tuple[int, ...], torch.dtype], tuple[Group, list[Tensor]]] = {}
    for part, group in parts:
        messages.setdefault((group.ranks, part.dtype), (group, []))[1].append(part)
    for group, views in messages.values():
        if len(views) == 1 and views[0].is_contiguous():
            dist.all_reduce(views[0], group=group.handle)
            continue
        flat = torch.cat([view.reshape(-1) for view in views])
        dist.all_reduce(flat, group=group.handle)
        for view, total in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))


def global_norm(gradients: Iterable[Tensor], *, group: Group, device: torch.device) -> Tensor:
    """2-norm over all ranks of ``group`` of the gradients that this rank counts.

    Args:
        gradients: Local gradients; a replicated one must be given by exactly one rank of the group.
        group: The ranks of one replica.
        device: Where the result lives.

    Returns:
        0-dimensional float32 tensor, equal on every rank.
    """
    local = [part for gradient in gradients for part in _parts(gradient)]
    square = torch.zeros((), dtype=torch.float64, device=device)
    if local:
        square += torch.nn.utils.get_total_norm(local).to(torch.float64) ** 2
    if group.size > 1:
        dist.all_reduce(square, group=group.handle)
    return square.sqrt().to(torch.float32)


def _parts(gradient: Tensor) -> Iterable[Tensor]:
    """A CPU adds up a tensor's squares one after the other, which loses the fourth digit in some million of them."""
    large = gradient.device.type == "cpu" and gradient.numel() > _LONG and gradient.is_contiguous()
    return gradient.view(-1).split(_LONG) if large else (gradient,)
