"""Interception of a model's attention, the one place that replaces its calls.

``torch.nn.MultiheadAttention`` is one call to a torch function mode. The mode is off inside its
handler, so the attention inside would not be intercepted. The handler therefore computes
``F.multi_head_attention_forward`` itself, for the case that occurs in training: self-attention
without extra keys, without returned weights.

Shapes: s local tokens, b samples, h channels, n heads; torch has the sequence first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.attention.attention_protocol import (
    Attention,
    AttentionCall,
    ContextParallelError,
    with_causal,
)


def intercepted(attention: Attention) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return torch's attention functions and their replacements, which call ``attention``."""
    return {
        F.scaled_dot_product_attention: partial(_scaled_dot_product, attention),
        F.multi_head_attention_forward: partial(_multi_head, attention),
    }


def _scaled_dot_product(  # noqa: PLR0913, torch's parameters
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` by ``attention``."""
    return attention(
        AttentionCall(
            query, key, value, causal=is_causal, mask=attn_mask, scale=scale, dropout_p=dropout_p
        )
    )


def _multi_head(attention: Attention, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute ``F.multi_head_attention_forward`` by ``attention``.

    Raises:
        ContextParallelError: The call is not plain self-attention.
    """
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    call.apply_defaults()
    bound = call.arguments
    x = bound["query"]
    _check_plain(bound, x)
    projected = F.linear(x, bound["in_proj_weight"], bound["in_proj_bias"])
    q, k, v = (
        torch.unflatten(part, -1, (bound["num_heads"], -1)).permute(1, 2, 0, 3)
        for part in projected.chunk(3, dim=-1)
    )
    causal = bool(bound["is_causal"])
    mask = bound["attn_mask"]
    padding = bound["key_padding_mask"]
    if mask is not None:
        mask = _seen(mask, bound["num_heads"])
    if causal:
        mask = None
    if padding is not None:
        keys = _seen(padding)[:, None, None, :]
        mask = with_causal(keys, q, k) if causal else keys if mask is None else mask & keys
        causal = False
    dropout_p = bound["dropout_p"] if bound["training"] else 0.0
    y = attention(AttentionCall(q, k, v, causal=causal, mask=mask, dropout_p=dropout_p))
    return F.linear(
        y.permute(2, 0, 1, 3).flatten(2), bound["out_proj_weight"], bound["out_proj_bias"]
    ), None


def _seen(mask: Tensor, heads: int | None = None) -> Tensor:
    """Return which keys are visible; torch's masks mark hidden keys with True or -inf."""
    if mask.dtype is not torch.bool and bool(((mask != 0) & (mask != -torch.inf)).any()):
        raise ContextParallelError(
            "nn.MultiheadAttention cannot be split over context ranks, because its mask has "
            "values other than 0 and -inf"
        )
    keys = ~mask if mask.dtype is torch.bool else mask == 0
    return torch.unflatten(keys, 0, (-1, heads)) if heads is not None and keys.dim() == 3 else keys


def _check_plain(bound: dict[str, Any], x: Tensor) -> None:
    unsupported = {
        "need_weights=True (call it with need_weights=False)": bound["need_weights"],
        "cross-attention": bound["key"] is not x or bound["value"] is not x,
        "separate projections (kdim, vdim)": bound["use_separate_proj_weight"],
        "add_bias_kv": bound["bias_k"] is not None or bound["bias_v"] is not None,
        "add_zero_attn": bound["add_zero_attn"],
        "static keys or values": bound["static_k"] is not None or bound["static_v"] is not None,
        "an input without a batch dimension": x.dim() != 3,
    }
    features = [name for name, present in unsupported.items() if present]
    if features:
        raise ContextParallelError(
            f"nn.MultiheadAttention with {', '.join(features)} cannot be split over context "
            "ranks. Use plain self-attention, or context_parallel_size=1"
        )
