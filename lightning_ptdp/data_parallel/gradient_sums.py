"""Sums of gradients over ranks other than the replicas, and the global norm.

Several ranks may hold the same part of a gradient, each with one term of a sum. Such parts are
parameters that saw a slice of the sequence, and tied parameters of other stages. With fewer
key/value heads than ranks, they are also the heads that several ranks hold in addition to heads of
their own. The norm reads whole buffers if possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.world.mesh import Group

_LONG = 2**16


def add_up(parts: Iterable[tuple[Tensor, Group]]) -> None:
    """Sum tensors over their groups, in place; one message per group and dtype.

    The ranks of a group must pass the same parts in the same order. This order must also hold
    across groups that share ranks.
    """
    messages: dict[tuple[tuple[int, ...], torch.dtype], tuple[Group, list[Tensor]]] = {}
    for part, group in parts:
        messages.setdefault((group.ranks, part.dtype), (group, []))[1].append(part)
    for group, views in messages.values():
        if len(views) == 1 and views[0].is_contiguous():
            dist.all_reduce(views[0], group=group.handle)
            continue
        flat, totals = flattened(views)
        dist.all_reduce(flat, group=group.handle)
        for view, total in zip(views, totals, strict=True):
            view.copy_(total)


def flattened(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat copy of tensors, and the views of it in their shapes."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def global_norm(
    gradients: Iterable[Tensor], *, group: Group, device: torch.device, order: float = 2.0
) -> Tensor:
    """Return the norm over all ranks of ``group`` of the gradients that this rank counts.

    Args:
        gradients: Local gradients; a replicated one must be given by exactly one rank of the group.
        group: The ranks of one replica.
        device: Device of the result.
        order: Order of the norm; ``inf`` for the largest element.

    Returns:
        0-dimensional float32 tensor, equal on every rank.
    """
    local = [part for gradient in gradients for part in _parts(gradient)]
    power = torch.zeros((), dtype=torch.float64, device=device)
    is_largest = math.isinf(order)
    if local:
        norm = torch.nn.utils.get_total_norm(local, order).to(torch.float64)
        power += norm if is_largest else norm**order
    if group.size > 1:
        dist.all_reduce(
            power, op=dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group.handle
        )
    return (power if is_largest else power ** (1 / order)).to(torch.float32)


def _parts(gradient: Tensor) -> Iterable[Tensor]:
    """Split a large CPU tensor, to keep the accuracy of its norm.

    A CPU adds a tensor's squares one after the other, which loses the fourth digit for some million
    elements.
    """
    large = gradient.device.type == "cpu" and gradient.numel() > _LONG and gradient.is_contiguous()
    return gradient.view(-1).split(_LONG) if large else (gradient,)


def joined(
    gradients: Iterable[Tensor], buffers: Iterable[tuple[Tensor, Mapping[int, int]]]
) -> list[Tensor]:
    """Return the same elements in few tensors; neighbours in a buffer become one tensor.

    Args:
        gradients: Gradients, some of which are views of the buffers.
        buffers: Flat tensors. Each comes with a map from the end of an entry to the beginning of
            the next one; the elements between them are zero.
    """
    storages = {
        buffer.untyped_storage().data_ptr(): (buffer, begins)
        for buffer, begins in buffers
        if buffer.numel()
    }
    storages.pop(0, None)  # the address of all meta tensors
    inside: dict[int, list[tuple[int, int]]] = {}
    tensors = []
    for gradient in gradients:
        address = gradient.untyped_storage().data_ptr()
        first = int(gradient.storage_offset())
        if address in storages and gradient.is_contiguous():
            stop = first + gradient.numel()
            inside.setdefault(address, []).append((first, storages[address][1].get(stop, stop)))
        else:
            tensors.append(gradient)
    for address, ranges in inside.items():
        tensors += [storages[address][0][first:stop] for first, stop in _united(ranges)]
    return tensors


def _united(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (first, stop), ascending, with adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if merged and merged[-1][1] >= first:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((first, stop))
    return merged
