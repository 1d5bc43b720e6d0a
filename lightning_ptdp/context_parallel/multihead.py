"""``torch.nn.MultiheadAttention`` under interception.

Its function is one call to a torch function mode, and inside of the mode's handler the mode is off: the attention inside would not be
seen. So the handler computes what ``F.multi_head_attention_forward`` does, for the case that occurs in training: self-attention without
extra keys, whose weights nobody asks for.

Shapes: s tokens here, b samples, h channels, n heads; torch has the sequence first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.context_parallel.errors import ContextParallelError

__all__ = ["multi_head_attention"]


def multi_head_attention(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """``F.multi_head_attention_forward`` with ``attend`` (signature of ``scaled_dot_product_attention``) inside.

    Raises:
        ContextParallelError: It is asked for something else than plain self-attention.
    """
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    x = given["query"]
    _check(given, x)
    projected = F.linear(x, given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = (part.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3) for part in projected.chunk(3, dim=-1))
    causal, mask, padding = bool(given["is_causal"]), given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = _seen(mask, given["num_heads"])
    if causal:
        mask = None
    if padding is not None:
        keys = _seen(padding)[:, None, None, :]
        if causal:
            length = x.size(0)
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril_()[None, None]
        mask, causal = (keys if mask is None else mask & keys), False
    y = attend(q, k, v, attn_mask=mask, dropout_p=given["dropout_p"] if given["training"] else 0.0, is_causal=causal)
    return F.linear(y.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]), None


def _seen(mask: Tensor, heads: int | None = None) -> Tensor:
    """torch's masks are True, or -inf, where a key is *not* seen."""
    if mask.dtype is not torch.bool and bool(((mask != 0) & (mask != -torch.inf)).any()):
        raise ContextParallelError(
            "nn.MultiheadAttention with a mask that adds other numbers than 0 and -inf cannot be split over context ranks"
        )
    seen = ~mask if mask.dtype is torch.bool else mask == 0
    return seen.unflatten(0, (-1, heads)) if heads is not None and seen.dim() == 3 else seen


def _check(given: dict[str, Any], x: Tensor) -> None:
    unsupported = {
        "need_weights=True (call the attention with need_weights=False)": given["need_weights"],
        "cross-attention": given["key"] is not x or given["value"] is not x,
        "separate projections (kdim, vdim)": given["use_separate_proj_weight"],
        "add_bias_kv": given["bias_k"] is not None or given["bias_v"] is not None,
        "add_zero_attn": given["add_zero_attn"],
        "static keys or values": given["static_k"] is not None or given["static_v"] is not None,
        "a batch dimension left out": x.dim() != 3,
    }
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise ContextParallelError(
            f"nn.MultiheadAttention with {', '.join(found)} cannot be split over context ranks; use plain self-attention, or "
            "context_parallel_size=1"
        )
