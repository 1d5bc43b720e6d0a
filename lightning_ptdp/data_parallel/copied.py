"""Gradients of what several tensor-parallel ranks hold alike, where other parts of the same parameter are split.

With fewer heads of keys and values than ranks, the ranks whose queries share a head hold the same one. Each sees the gradient of its
own queries only; the whole is their sum, which every copy needs to stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.mesh import Group

__all__ = ["Copied", "sum_copies"]

Copied = tuple[tuple[slice, ...], Group]
"""Where in a parameter the copied elements are, and the ranks that hold them."""


def sum_copies(gradients: Iterable[tuple[Tensor, Iterable[Copied]]]) -> None:
    """Sum the copied parts of gradients over their ranks, in place; one message a group and dtype.

    The ranks of a group must give the same parts in the same order.
    """
    parts: dict[tuple[tuple[int, ...], torch.dtype], tuple[Group, list[Tensor]]] = {}
    for gradient, copied in gradients:
        for where, group in copied:
            parts.setdefault((group.ranks, gradient.dtype), (group, []))[1].append(gradient[where])
    for group, views in parts.values():
        flat = torch.cat([view.reshape(-1) for view in views])
        dist.all_reduce(flat, group=group.handle)
        for view, total in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))
