"""Tokens to the ranks of their experts, and back: one all-to-all of uneven sizes each way.

Shapes: n tokens here, k experts a token, h features; E experts, e ranks; r rows that came here, each for one of the E/e experts here.

    forward    all-to-all of counts    all-to-all of rows       experts    all-to-all of their outputs    weighted sum of k
    backward                           all-to-all of gradients             all-to-all of gradients

How many rows come from whom is a number that the host has to know before it can ask for them: one wait for the device a layer. Together
with it comes what a router may have done wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.world.mesh import Group

__all__ = ["Dispatched", "Faults", "dispatch"]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a router did wrong here.

    Attributes:
        nowhere: Choices of experts that do not exist.
        not_finite: Weights that are NaN or infinite.
    """

    nowhere: int
    not_finite: int


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What came here for the experts here, and the way back.

    Attributes:
        rows_rh: (r, h), in the order of the ranks that sent them, and of each by expert.
        experts_r: (r,) int64, which of the experts here each is for.
        faults: What the router here did wrong; rows of choices that do not exist went to the last expert.
    """

    rows_rh: Tensor
    experts_r: Tensor
    faults: Faults
    order: Tensor
    sent: list[int]
    received: list[int]
    group: Group

    def combine(self, outputs_rh: Tensor, weights_nk: Tensor) -> Tensor:
        """For each token here the weighted sum of what its experts made of it, (n, h)."""
        back = _Exchange.apply(outputs_rh, self.received, self.sent, self.group)
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        outputs_nkh = back.index_select(0, places).view(*weights_nk.shape, outputs_rh.size(-1))
        return (outputs_nkh * weights_nk.unsqueeze(-1)).sum(1).to(outputs_rh.dtype)


def dispatch(x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor, *, num_experts: int, group: Group) -> Dispatched:
    """Send each token to the ranks of its experts; collective over ``group``, forward and backward.

    Args:
        x_nh: Tokens.
        index_nk: int64, the experts of each, 0 to E - 1.
        weights_nk: Of each of them.
        num_experts: E, a multiple of the group's size; the group's i-th rank has the i-th part of them.
        group: e ranks.
    """
    chosen = index_nk.reshape(-1)
    exists = (chosen >= 0) & (chosen < num_experts)
    chosen = torch.where(exists, chosen, num_experts - 1)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x_nh.device).scatter_add_(0, chosen, torch.ones_like(chosen))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group.handle)
    per_rank = torch.stack([counts.view(group.size, -1).sum(1), theirs.view(group.size, -1).sum(1)])
    faults = torch.stack([(~exists).sum(), (~weights_nk.isfinite()).sum()])
    *sizes, nowhere, not_finite = torch.cat([per_rank.view(-1), faults]).tolist()
    sent, received = sizes[: group.size], sizes[group.size :]
    rows_rh = _Exchange.apply(x_nh.index_select(0, order // index_nk.size(1)), sent, received, group)
    here = torch.arange(num_experts, device=x_nh.device) % (num_experts // group.size)
    return Dispatched(
        rows_rh=rows_rh,
        experts_r=here.repeat_interleave(theirs, output_size=sum(received)),
        faults=Faults(nowhere=nowhere, not_finite=not_finite),
        order=order,
        sent=sent,
        received=received,
        group=group,
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchange(grad, sent, received, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Consecutive rows of ``x``, so many to each rank; what came, in the order of the ranks."""
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group.handle)
    return result
