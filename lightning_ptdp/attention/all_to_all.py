"""All-to-all attention: each rank computes some heads over the full sequence.

See DeepSpeed-Ulysses, arXiv 2309.14509.

Before the attention every rank exchanges its slice of all heads for the full sequence of n/c heads.
After the attention it exchanges them back. torch's own attention runs between them, with all its
kernels and masks. A layer makes two exchanges in each direction: one of the queries, keys and
values, one of the results. Of each, 1/c stays on its rank. There can be no more ranks than heads,
and masks are (s, s).

Shapes: b samples, n heads, m key/value heads (m divides n), s tokens in the full sequence, s/c
local tokens, d channels per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.attention.attention_protocol import (
    AttentionCall,
    AttentionTraffic,
    ContextParallelError,
    DistributedAttention,
    plain_attention,
)
from lightning_ptdp.attention.sequence_chunks import shard_sequence, unshard_sequence
from lightning_ptdp.shims.torch_distributed import start_traced, wait_traced
from lightning_ptdp.world.mesh import Group

_EXCHANGE_OPERATIONS = 15


class AllToAllAttention(DistributedAttention):
    """Attention by an exchange of heads.

    c must divide n. If there are fewer key/value heads than ranks, the heads are copied before they
    are sent, and their gradients are summed. A mask with rows is gathered to (s, s).
    """

    name = "all_to_all"
    divides_heads = True

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the local queries' results.

        Raises:
            ContextParallelError: c does not divide n.
        """
        group = self.group
        k = call.k
        v = call.v
        try:
            self.check_heads(call.q.size(1), group.size)
        except ValueError as error:
            raise ContextParallelError(str(error)) from None
        copies = self.held_kv_heads(k.size(1), group.size) // k.size(1)
        if copies > 1:
            k = k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
        q, k, v = _HeadExchange.apply(_to_heads, _to_sequence, group, call.q, k, v)
        mask = None if call.mask is None else _full_mask(call.mask, q, group)
        full_call = AttentionCall(
            q, k, v, causal=call.causal, mask=mask, scale=call.scale, dropout_p=call.dropout_p
        )
        return _HeadExchange.apply(_to_sequence, _to_heads, group, plain_attention(full_call))[0]

    @classmethod
    def held_kv_heads(cls, kv_heads: int, size: int) -> int:
        """Return the key/value heads, copied if there are fewer than ranks."""
        return math.lcm(kv_heads, size)

    @classmethod
    def operations(cls, size: int) -> int:
        """Return parts, their copy, the exchange and the reordering of four tensors."""
        return 4 * _EXCHANGE_OPERATIONS

    @classmethod
    def seconds(cls, traffic: AttentionTraffic) -> tuple[float, float]:
        """Return the seconds to pack, exchange and order; the attention hides nothing.

        Queries, keys and values are exchanged before the attention, and its result after it. The
        backward does the same.
        """
        sizes = ((traffic.queries + traffic.pairs) * traffic.width, traffic.results * traffic.width)
        total = sum(traffic.all_to_all(size) + 4 * size / traffic.memory for size in sizes)
        return total, total


Exchange: TypeAlias = Callable[[tuple[Tensor, ...], Group], tuple[Tensor, ...]]


class _HeadExchange(torch.autograd.Function):
    """Concurrent exchange of several tensors by ``function``, with gradient ``inverse``."""

    @staticmethod
    def forward(
        ctx: Any, function: Exchange, inverse: Exchange, group: Group, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.inverse = inverse
        ctx.group = group
        return function(tensors, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            None,
            *_HeadExchange.apply(ctx.inverse, ctx.function, ctx.group, *grads),
        )


def _to_heads(tensors: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    """Exchange (b, n, s/c, d) -> (b, n/c, s, d)."""
    traded = _trade([x.chunk(group.size, 1) for x in tensors], group)
    return tuple(unshard_sequence(parts, 2) for parts in traded)


def _to_sequence(tensors: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
    """Exchange (b, n/c, s, d) -> (b, n, s/c, d)."""
    size = group.size
    sent = [[shard_sequence(x, 2, rank=rank, size=size) for rank in range(size)] for x in tensors]
    return tuple(torch.cat(parts, dim=1) for parts in _trade(sent, group))


def _trade(sent: Sequence[Sequence[Tensor]], group: Group) -> list[list[Tensor]]:
    """Send each rank its part of several tensors, and return the parts from each rank.

    The parts of a tensor are in the order of the ranks and have one shape. They travel as one
    message to each rank. A rank's own part does not travel.
    """
    others = [rank for rank in range(group.size) if rank != group.rank]
    message = torch.cat([parts[rank].reshape(-1) for rank in others for parts in sent])
    counts = [len(message) // len(others)] * group.size
    counts[group.rank] = 0
    if torch.compiler.is_compiling():
        traced = start_traced("all_to_all_single", message, counts, counts, group.name)
        received = wait_traced(traced)
    else:
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, counts, counts, group=group.handle)
    arrived = iter(received.split([parts[0].numel() for _ in others for parts in sent]))
    result = [list(parts) for parts in sent]
    for rank in others:
        for parts in result:
            parts[rank] = next(arrived).view(parts[rank].shape)
    return result


def _full_mask(mask: Tensor, q: Tensor, group: Group) -> Tensor:
    """Return the mask of all queries for this rank's heads."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.size(-2) > 1:
        rows = mask.to(torch.uint8) if mask.dtype is torch.bool else mask
        heads = rows if rows.size(1) > 1 else rows.expand(-1, group.size, -1, -1)
        mask = _to_heads((heads,), group)[0].to(mask.dtype)
    elif mask.size(1) > 1:
        mask = mask.chunk(group.size, 1)[group.rank]
    return mask if mask.dtype is torch.bool else mask.to(q.dtype)
