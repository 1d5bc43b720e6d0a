"""Puts ring or all-to-all attention in the place of every call of ``scaled_dot_product_attention`` in somebody's model, and the whole
sequence's first token in the place of the slice's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.context_parallel.all_to_all import all_to_all_attention
from lightning_ptdp.context_parallel.errors import ContextParallelError
from lightning_ptdp.context_parallel.masks import read_mask
from lightning_ptdp.context_parallel.multihead import multi_head_attention
from lightning_ptdp.context_parallel.ring import ring_attention
from lightning_ptdp.context_parallel.tokens import pick_token
from lightning_ptdp.matrix_product import autocast_dtype
from lightning_ptdp.replacing import Replacing
from lightning_ptdp.world.mesh import Group

__all__ = ["AttentionKind", "Interceptor"]

AttentionKind = Literal["ring", "all_to_all"]


@dataclass(kw_only=True)
class Interceptor:
    """Attention as the calls of one forward see it.

    Attributes:
        kind: Which attention takes the place.
        group: The context group.
        length: s, tokens of the whole sequence.
        padded: The batch holds padding, on whatever rank (``batch.is_padded``).
        differentiates: The forward began with gradients enabled.
        attention_calls: Those that were replaced so far.
    """

    kind: AttentionKind
    group: Group
    length: int
    padded: bool
    differentiates: bool
    attention_calls: int = 0

    def mode(self) -> Replacing:
        """The mode under which calls are intercepted."""
        return Replacing(
            {
                F.scaled_dot_product_attention: self.attend,
                F.multi_head_attention_forward: partial(multi_head_attention, self.attend),
                Tensor.__getitem__: self.index,
            }
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` of the whole sequence, of which this rank has its slice; collective.

        Raises:
            ContextParallelError: The call has no meaning for a slice of the sequence.
        """
        self._check(query, key, value)
        self.attention_calls += 1
        if query.dim() == 3:
            # Samples and heads in one dimension: as good as heads.
            query, key, value = query[None], key[None], value[None]
            return self.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]
        dtype = autocast_dtype(query)
        q, k, v = (x if dtype is None else x.to(dtype) for x in (query, key, value))
        whole = read_mask(attn_mask, is_causal=is_causal, q=q, kv_heads=k.size(1), group=self.group, padded=self.padded)
        # Heads that this rank's call has more are copies, one after another.
        copies = k.size(1) // whole.kv_heads
        k, v = k[:, ::copies], v[:, ::copies]
        attention = ring_attention if self.kind == "ring" else all_to_all_attention
        return attention(q, k, v, group=self.group, causal=whole.causal, mask=whole.mask, scale=scale, dropout_p=dropout_p)

    def index(self, x: Tensor, index: Any) -> Tensor:
        """``x[index]`` of the whole sequence, if it picks a token."""
        token = pick_token(x, index, length=self.length, group=self.group)
        return x[index] if token is None else token

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        local = self.length // self.group.size
        if query.dim() not in (3, 4):
            raise ContextParallelError(
                f"attention on queries of shape {tuple(query.shape)} cannot be split over context ranks: it takes (batch, heads, "
                "sequence, channels)"
            )
        lengths = (query.size(-2), key.size(-2), value.size(-2))
        if lengths != (local, local, local):
            raise ContextParallelError(
                f"attention on {lengths[0]} queries and {lengths[1]} keys, while each of {self.group.size} context ranks holds {local} "
                f"of {self.length} tokens: only self-attention over the batch's sequence can be split. A key/value cache, "
                "cross-attention, or tokens that the model adds to the sequence need context_parallel_size=1"
            )
        if self.differentiates and not torch.is_grad_enabled():
            raise ContextParallelError(
                "attention runs with gradients disabled inside a forward that has them enabled, as under a reentrant checkpoint, whose "
                "recomputation could not be intercepted: use PTDPStrategy(recompute=...) or use_reentrant=False; compute parts of the "
                "model that are frozen by requires_grad=False, not under no_grad"
            )
