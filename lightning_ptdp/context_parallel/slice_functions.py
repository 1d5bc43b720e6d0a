"""Interception of attention and token selection in an unmodified model.

Every call of ``scaled_dot_product_attention`` becomes ring or all-to-all attention. A model that
selects a token gets the token of the full sequence instead of the slice's: ``x[:, 0]`` for a
classifier, ``x[:, -1]`` for a score. The group's first rank holds both tokens
(``sequence_chunks.py``) and broadcasts them.

``torch.nn.MultiheadAttention`` is one call to a torch function mode. The mode is off inside its
handler, so the attention inside would not be intercepted. The handler therefore computes
``F.multi_head_attention_forward`` itself, for the case that occurs in training: self-attention
without extra keys, without returned weights.

Shapes: s local tokens, b samples, h channels, n heads; torch has the sequence first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.attention.all_to_all import all_to_all_attention
from lightning_ptdp.attention.context_parallel_error import ContextParallelError
from lightning_ptdp.attention.masks import read_mask
from lightning_ptdp.attention.ring import ring_attention
from lightning_ptdp.base.function_replacement import Replacing
from lightning_ptdp.context_parallel.dropout_draws import SliceDraws
from lightning_ptdp.context_parallel.shifts import check_index, shifting_functions
from lightning_ptdp.forward.matrix_product import autocast_dtype
from lightning_ptdp.world.mesh import Group

__all__ = ["AttentionKind", "Interceptor", "pick_token"]

AttentionKind = Literal["ring", "all_to_all"]


@dataclass(kw_only=True)
class Interceptor:
    """Intercepted attention calls of one forward.

    Attributes:
        kind: Attention that replaces the model's.
        group: The context group.
        length: s, tokens of the full sequence.
        padded: True if the batch contains padding on any rank (``sequence_batch.is_padded``).
        differentiates: True if the forward began with gradients enabled.
        attended: True if a call was replaced.
        shifts: Error about tokens or labels that the step shifts, if it does.
        draws_alike: Returns True while all ranks of the group draw from one stream of random
            numbers.
    """

    kind: AttentionKind
    group: Group
    length: int
    padded: bool
    differentiates: bool
    attended: bool = False
    shifts: ContextParallelError | None = None
    draws_alike: Callable[[], bool] = bool

    def mode(self) -> Replacing:
        """Return the mode under which calls are intercepted."""
        draws = SliceDraws(
            length=self.length,
            rank=self.group.rank,
            size=self.group.size,
            applies=lambda: self.draws_alike(),
        )
        return Replacing(
            {
                **draws.replaced(),
                **shifting_functions(self.length, self.group.size),
                F.scaled_dot_product_attention: self.attend,
                F.multi_head_attention_forward: partial(_multi_head_attention, self.attend),
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
        """Compute ``scaled_dot_product_attention`` over the full sequence.

        This rank holds its slice of the queries, keys and values. Collective.

        Raises:
            ContextParallelError: The call has no meaning for a slice of the sequence.
        """
        self._check(query, key, value)
        self.attended = True
        if query.dim() == 3:
            # One dimension for samples and heads: treat it as heads.
            query, key, value = query[None], key[None], value[None]
            return self.attend(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )[0]
        dtype = autocast_dtype(query)
        q, k, v = (x if dtype is None else x.to(dtype) for x in (query, key, value))
        whole = read_mask(
            attn_mask,
            is_causal=is_causal,
            q=q,
            kv_heads=k.size(1),
            group=self.group,
            padded=self.padded,
        )
        # Surplus heads of this rank's call are copies, adjacent to each other.
        copies = k.size(1) // whole.kv_heads
        k, v = k[:, ::copies], v[:, ::copies]
        attention = ring_attention if self.kind == "ring" else all_to_all_attention
        return attention(
            q,
            k,
            v,
            group=self.group,
            causal=whole.causal,
            mask=whole.mask,
            scale=scale,
            dropout_p=dropout_p,
        )

    def index(self, x: Tensor, index: Any) -> Tensor:
        """Return ``x[index]`` of the full sequence, if it selects a token.

        Raises:
            ContextParallelError: It shifts the sequence, or selects a token in the middle.
        """
        try:
            check_index(x, index, length=self.length, size=self.group.size)
        except ContextParallelError as error:
            if x.is_floating_point():
                raise
            self.shifts = (
                error  # a step may shift labels only to count those of a model that shifts
            )
        token = pick_token(x, index, length=self.length, group=self.group)
        return x[index] if token is None else token

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        local = self.length // self.group.size
        if query.dim() not in (3, 4):
            raise ContextParallelError(
                f"attention on queries of shape {tuple(query.shape)} cannot be split over context "
                "ranks: it takes (batch, heads, "
                "sequence, channels)"
            )
        lengths = (query.size(-2), key.size(-2), value.size(-2))
        if lengths != (local, local, local):
            raise ContextParallelError(
                f"attention on {lengths[0]} queries and {lengths[1]} keys, while each of "
                f"{self.group.size} context ranks holds {local} "
                f"of {self.length} tokens: only self-attention over the batch's sequence can be "
                "split. A key/value cache, "
                "cross-attention, or tokens that the model adds to the sequence need "
                "context_parallel_size=1"
            )
        if self.differentiates and not torch.is_grad_enabled():
            raise ContextParallelError(
                "attention runs with gradients disabled inside a forward that has them enabled, "
                "as under a reentrant checkpoint, whose "
                "recomputation could not be intercepted: use PTDPStrategy(recompute=...) or "
                "use_reentrant=False; compute parts of the "
                "model that are frozen by requires_grad=False, not under no_grad"
            )


def pick_token(x: object, index: object, *, length: int, group: Group) -> Tensor | None:
    """Return the result of ``x[index]`` for the full sequence.

    Collective if the index selects a token; it must do so on all ranks of the group.

    Args:
        x: Indexed tensor. A hidden state (b, s/c, h) is recognized by its floating-point dtype and
            the slice's length along dimension 1.
        index: The index in ``x[...]``.
        length: s, tokens of the full sequence.
        group: The context group.

    Returns:
        (b, ...) with a gradient for the rank that holds the token; None if no token of a hidden
        state is selected.

    Raises:
        ContextParallelError: A token in the middle is selected, or a token of each sample by
            number.
    """
    if not (
        isinstance(x, Tensor)
        and x.dim() == 3
        and x.is_floating_point()
        and x.size(1) == length // group.size
    ):
        return None
    if not (isinstance(index, tuple) and len(index) > 1):
        return None
    if (
        isinstance(index[0], Tensor)
        and isinstance(index[1], Tensor)
        and not index[1].is_floating_point()
    ):
        picked = "a token of each sample by its number"
    elif isinstance(index[0], Tensor) or index[0] != slice(None) or type(index[1]) is not int:
        return None
    else:
        picked = f"token {index[1]}" if index[1] not in (0, -1) else ""
    if picked:
        raise ContextParallelError(
            f"the model picks {picked} out of a hidden state, of which each of {group.size} "
            "context ranks holds a slice of "
            f"{x.size(1)} tokens; only the first (0) and the last (-1) of the sequence can be "
            "picked. Use context_parallel_size=1"
        )
    return _FromFirst.apply(x[index].contiguous(), group)


class _FromFirst(torch.autograd.Function):
    """Broadcast of the first rank's tensor; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        result = x.detach().clone()
        dist.broadcast(result, src=group.ranks[0], group=group.handle)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total if ctx.group.rank == 0 else torch.zeros_like(total), None


def _multi_head_attention(
    attend: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute ``F.multi_head_attention_forward`` with ``attend`` as the attention.

    ``attend`` has the signature of ``scaled_dot_product_attention``.

    Raises:
        ContextParallelError: The call is not plain self-attention.
    """
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    x = given["query"]
    _check_plain(given, x)
    projected = F.linear(x, given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = (
        torch.unflatten(part, -1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
        for part in projected.chunk(3, dim=-1)
    )
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
    y = attend(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=given["dropout_p"] if given["training"] else 0.0,
        is_causal=causal,
    )
    return F.linear(
        y.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]
    ), None


def _seen(mask: Tensor, heads: int | None = None) -> Tensor:
    """Return which keys are visible; torch's masks mark hidden keys with True or -inf."""
    if mask.dtype is not torch.bool and bool(((mask != 0) & (mask != -torch.inf)).any()):
        raise ContextParallelError(
            "nn.MultiheadAttention with a mask that adds other numbers than 0 and -inf cannot be "
            "split over context ranks"
        )
    seen = ~mask if mask.dtype is torch.bool else mask == 0
    return torch.unflatten(seen, 0, (-1, heads)) if heads is not None and seen.dim() == 3 else seen


def _check_plain(given: dict[str, Any], x: Tensor) -> None:
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
            f"nn.MultiheadAttention with {', '.join(found)} cannot be split over context ranks; "
            "use plain self-attention, or "
            "context_parallel_size=1"
        )
