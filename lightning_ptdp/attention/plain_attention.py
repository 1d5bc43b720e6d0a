"""Attention by torch's own kernels, and attention whose dropped weights are chosen by the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.attention.attention_protocol import AttentionCall
from lightning_ptdp.attention.masks import additive, with_causal

__all__ = ["KeyedAttention", "plain_attention"]


def plain_attention(call: AttentionCall) -> Tensor:
    """Compute attention by ``scaled_dot_product_attention``."""
    q, k, mask, causal = call.q, call.k, call.mask, call.causal
    if causal and mask is not None:  # torch accepts only one of the two
        mask, causal = with_causal(mask, q, k), False
    return F.scaled_dot_product_attention(
        q,
        k,
        call.v,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=q.dim() > 2 and q.size(-3) != k.size(-3),
    )


@dataclass(frozen=True)
class KeyedAttention:
    """Attention that computes its weights explicitly if some of them are dropped.

    Attributes:
        kept: Returns the factors of the weights (b, n, q, k), 0 or 1 / (1 - p), for a probability p.
    """

    kept: Callable[[Tensor, float], Tensor]

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the queries' results."""
        if call.dropout_p == 0.0:
            return plain_attention(call)
        copies = call.q.size(-3) // call.k.size(-3)
        k, v = (x.repeat_interleave(copies, -3) for x in (call.k, call.v))
        scores = call.q @ k.transpose(-2, -1) * call.factor
        mask = with_causal(call.mask, call.q, k) if call.causal else call.mask
        if mask is not None:
            scores = scores + additive(mask, scores.dtype)
        weights = scores.softmax(-1)
        return (weights * self.kept(weights, call.dropout_p)) @ v
