"""Attention as a protocol: calls, masks, errors, the plain implementation, and interception.

A model calls torch's function; ``intercepted`` makes an ``AttentionCall`` of it for one of these::

    plain_attention     torch's own kernels
    KeyedAttention      dropped weights are the same in every layout
    SlicedAttention     reads the mask of a slice, and calls one of the next two
    RingAttention       keys and values are passed around the ranks
    AllToAllAttention   each rank computes some heads over the full sequence

Packed sequences are a mask with a row for each local query (``document_mask``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.world.mesh import Group


@dataclass(frozen=True)
class AttentionCall:
    """One computation of softmax(scale q k^T + mask) v.

    Attributes:
        q: Queries (b, n, q, d).
        k: Keys (b, m, k, d); m divides n.
        v: Values (b, m, k, e).
        causal: A token attends only to itself and earlier tokens, in addition to the mask.
        mask: Boolean (True: visible) or additive; broadcasts to (b, n, q, k).
        scale: Factor on q k^T; None: 1 / sqrt(d).
        dropout_p: Probability of dropping an attention weight.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    causal: bool = False
    mask: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0

    @property
    def factor(self) -> float:
        """Return the factor on q k^T."""
        return float(self.q.size(-1) ** -0.5) if self.scale is None else self.scale


Attention = Callable[[AttentionCall], Tensor]
"""Function that returns the result (b, n, q, e) of a call."""


@dataclass(frozen=True, kw_only=True)
class AttentionTraffic:
    """Sizes and speeds of one attention on one context rank, for the planner.

    Attributes:
        size: c.
        queries, results, pairs: Numbers of elements of the local queries, results, and keys and
            values.
        width: Bytes of an element.
        causal: True if a token attends only to itself and earlier tokens.
        forward, backward: Seconds of the attention itself.
        overlaps: True if messages overlap with computation.
        hop: Seconds to send so many bytes to the next rank.
        all_to_all: Seconds to exchange so many bytes.
        memory: Bytes that the device reads or writes in a second.
    """

    size: int
    queries: float
    results: float
    pairs: float
    width: int
    causal: bool
    forward: float
    backward: float
    overlaps: bool
    hop: Callable[[float], float]
    all_to_all: Callable[[float], float]
    memory: float


@dataclass(frozen=True)
class DistributedAttention(ABC):
    """Attention of this rank's queries to the keys and values of all ranks of a group.

    Calls are collective, forward and backward. Shapes are those of ``AttentionCall`` with s/c local
    queries, keys and values in the order of ``sequence_chunks.py``. A mask has the local queries
    (or one row for all) and all keys, these in the order of the full sequence; it gets no gradient.
    ``causal`` refers to positions in the full sequence.

    To add a kind, derive a class from this one and add it to ``ATTENTIONS``.

    Attributes:
        name: Value of the option ``context_parallel_attention``.
        divides_heads: True if every rank must get whole heads.
        group: The context group, preferably without other communication.
    """

    name: ClassVar[str]
    divides_heads: ClassVar[bool] = False
    group: Group

    @abstractmethod
    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the local queries' results."""

    @classmethod
    def check_heads(cls, heads: int, size: int) -> None:
        """Check that ``heads`` of one tensor-parallel rank suit a group of ``size``.

        Key/value heads need no check.

        Raises:
            ValueError: They do not.
        """
        if cls.divides_heads and heads % size:
            divisors = ", ".join(str(c) for c in range(1, heads + 1) if heads % c == 0)
            raise ValueError(
                f"context_parallel_attention={cls.name!r} distributes the {heads} heads of a "
                "tensor-parallel rank, but they are not divisible by "
                f"context_parallel_size={size}. Use a context_parallel_size of {divisors}, or "
                "context_parallel_attention='ring'"
            )

    @classmethod
    def held_kv_heads(cls, kv_heads: int, size: int) -> int:
        """Return the key/value heads that a rank keeps for each local token."""
        return kv_heads

    @classmethod
    @abstractmethod
    def operations(cls, size: int) -> int:
        """Return the number of operations that a forward launches besides the attention itself."""

    @classmethod
    @abstractmethod
    def seconds(cls, traffic: AttentionTraffic) -> tuple[float, float]:
        """Return the estimated seconds of a forward and a backward besides the attention itself."""


# ---- Exception of context parallelism ------------------------------------------------------------


class ContextParallelError(PTDPError, RuntimeError):
    """The model's forward did something that a slice of the sequence does not support.

    The message names the operation and the remedy.
    """


# ---- Masks of attention: boolean (True: visible) or added to the scores --------------------------


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers to add to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def with_causal(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask that also hides later keys; None: a mask that does only this."""
    past = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril_()
    if mask is None:
        return past
    return mask & past if mask.dtype is torch.bool else mask.masked_fill(~past, -torch.inf)


def find_documents(positions: Tensor) -> Tensor:
    """Return the document index of each token of packed sequences, (b, s) int64.

    A document begins where the positions (b, s) do not continue.
    """
    return F.pad(positions.diff() != 1, (1, 0)).cumsum(-1)


def document_mask(documents: Tensor, queries: Tensor) -> Tensor:
    """Return the causal mask within documents, (b, 1, q, s).

    Args:
        documents: Document index of each token, (b, s) int64.
        queries: Positions of the queries in the sequence, (q) int64.
    """
    past = queries[:, None] >= torch.arange(documents.size(1), device=queries.device)
    return (past & (documents[:, queries, None] == documents[:, None, :]))[:, None]


# ---- Attention by torch's own kernels, and attention with dropout that the caller determines -----


def plain_attention(call: AttentionCall) -> Tensor:
    """Compute attention by ``scaled_dot_product_attention``."""
    q = call.q
    k = call.k
    mask = call.mask
    causal = call.causal
    if causal and mask is not None:  # torch accepts only one of the two
        mask = with_causal(mask, q, k)
        causal = False
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
        kept: Returns the factors of the weights (b, n, q, k), 0 or 1 / (1 - p), for a probability
            p.
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


# ---- Interception of a model's attention, the one place that replaces its calls ------------------
#
# ``torch.nn.MultiheadAttention`` is one call to a torch function mode. The mode is off inside its
# handler, so the attention inside would not be intercepted. The handler therefore computes
# ``F.multi_head_attention_forward`` itself, for the case that occurs in training: self-attention
# without extra keys, without returned weights.
#
# Shapes: s local tokens, b samples, h channels, n heads; torch has the sequence first.


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
        if causal:
            mask = with_causal(keys, q, k)
            causal = False
        else:
            mask = keys if mask is None else mask & keys
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
    features = [name for name, is_used in unsupported.items() if is_used]
    if features:
        raise ContextParallelError(
            f"nn.MultiheadAttention with {', '.join(features)} cannot be split over context "
            "ranks. Use plain self-attention, or context_parallel_size=1"
        )
