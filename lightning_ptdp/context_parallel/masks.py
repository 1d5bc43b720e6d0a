"""Meaning of an attention call's mask for the whole sequence.

A model builds masks from what it has: a slice of the tokens. Two things can be read from such a
mask with certainty, since models build
only these from a length and a padding mask: *causal or not*, and *which of the local tokens may be
seen*; the latter is put together over the ranks. Any other mask between local tokens says nothing
about the tokens elsewhere and is refused. A mask that is local in its queries and whole in its
keys, cut from the batch, means what it says.

Shapes: b samples, n heads, s tokens in the whole sequence, s/c here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.context_parallel.context_parallel_error import ContextParallelError
from lightning_ptdp.context_parallel.sequence_chunks import unshard_sequence
from lightning_ptdp.shims.torch import all_gather_single
from lightning_ptdp.world.mesh import Group

__all__ = ["WholeMask", "read_mask"]

_EITHER, _BIDIRECTIONAL, _CAUSAL = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class WholeMask:
    """Mask that an attention call asks for.

    Attributes:
        causal: A token sees itself and what stands before it in the whole sequence.
        kv_heads: Key/value heads of the call. Some models copy these where they give a mask; then
            the rank with the fewest counts.
        mask: Which keys are seen besides, (b or 1, n or 1, s/c or 1, s), boolean or additive, in
            the order of the whole sequence.
    """

    causal: bool
    kv_heads: int
    mask: Tensor | None = None


def read_mask(
    mask: Tensor | None, *, is_causal: bool, q: Tensor, kv_heads: int, group: Group, padded: bool
) -> WholeMask:
    """Read the mask of a call on a rank's slice; collective if ``padded``.

    Args:
        mask: As given to ``scaled_dot_product_attention``, or None.
        is_causal: As given.
        q: The queries (b, n, s/c, d).
        kv_heads: Key/value heads of the call on this rank.
        group: The context group.
        padded: The batch holds padding, on whatever rank. There some ranks may give a mask that
            others, without padding in their slice, leave out; all have to agree.

    Raises:
        ContextParallelError: The mask has no meaning for the whole sequence.
    """
    local_length = q.size(2)
    if mask is None:
        kind, keys = (_CAUSAL if is_causal else _BIDIRECTIONAL), None
    else:
        if is_causal:
            raise ContextParallelError(
                "scaled_dot_product_attention takes attn_mask or is_causal=True, not both"
            )
        if mask.requires_grad:
            raise ContextParallelError(
                "context parallelism does not compute gradients of an attention mask or bias; use "
                "context_parallel_size=1"
            )
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.size(-1) == local_length * group.size and mask.size(-2) in (1, local_length):
            return WholeMask(causal=False, mask=mask, kv_heads=kv_heads)
        if mask.size(-1) != local_length or mask.size(-2) not in (1, local_length):
            raise ContextParallelError(_refusal(mask, local_length, group))
        kind, keys = _read_local(mask, local_length, group)
    if padded:
        seen = torch.ones(q.size(0), local_length, dtype=torch.int32, device=q.device)
        return _agree(
            kind, seen if keys is None else keys.expand_as(seen).to(seen), kv_heads, group
        )
    if keys is not None and not bool(keys.all()):
        raise ContextParallelError(
            "the model masks some tokens as padding, but the batch has no padding mask that every "
            "rank could know of it from: hand it in "
            "the batch under 'attention_mask', 'key_padding_mask' or 'padding_mask' (batch, "
            "sequence)"
        )
    return WholeMask(causal=kind == _CAUSAL, kv_heads=kv_heads)


def _read_local(mask: Tensor, length: int, group: Group) -> tuple[int, Tensor]:
    """Return whether a mask between local tokens is causal, and which of them are visible, (b or 1,
    s/c) boolean."""
    seen = _seen(mask, length, group)
    keys = seen[:, :1, -1:]
    patterns = {_BIDIRECTIONAL: keys}
    if seen.size(-2) > 1:
        patterns[_CAUSAL] = (
            keys & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril_()
        )
    found = torch.stack([(seen == pattern).all() for pattern in patterns.values()]).tolist()
    fits = [kind for kind, fit in zip(patterns, found, strict=True) if fit]
    if not fits:
        raise ContextParallelError(_refusal(mask, length, group))
    return (fits[0] if len(fits) == 1 else _EITHER), keys[:, 0, 0]


def _seen(mask: Tensor, length: int, group: Group) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    lowest = torch.finfo(mask.dtype).min / 2
    if not bool((seen | (mask < lowest)).all()):
        raise ContextParallelError(
            "the attention mask adds other numbers than 0 and -inf to the scores (a bias that "
            "depends on positions?), which a slice of the "
            "sequence knows only for its own tokens; " + _refusal(mask, length, group)
        )
    return seen


def _agree(kind: int, keys: Tensor, kv_heads: int, group: Group) -> WholeMask:
    """Put the ranks' keys (b, s/c) int32 together. A slice of nothing but padding fits causal and
    bidirectional; the others know."""
    samples, length = keys.shape
    mine = torch.cat((keys, keys.new_tensor([[kind, kv_heads]]).expand(samples, 2)), 1)
    gathered = mine.new_empty(group.size * samples, length + 2)
    all_gather_single(gathered, mine, group.handle)
    parts = gathered.view(group.size, samples, length + 2)
    told, heads = parts[:, 0, length:].unbind(1)
    kinds = set(told.tolist()) - {_EITHER}
    if len(kinds) > 1:
        raise ContextParallelError(
            "some ranks of a context group gave causal attention and others bidirectional in the "
            "same call: the model decides from the "
            "values of its slice; pass is_causal explicitly"
        )
    whole = unshard_sequence(list(parts[..., :length].bool()), 1)
    mask = None if bool(whole.all()) else whole[:, None, None]
    return WholeMask(causal=kinds != {_BIDIRECTIONAL}, mask=mask, kv_heads=int(heads.min()))


def _refusal(mask: Tensor, length: int, group: Group) -> str:
    return (
        f"an attention mask of shape {tuple(mask.shape)} cannot be used under context "
        f"parallelism: each of {group.size} ranks holds "
        f"{length} of {length * group.size} tokens, and only a causal mask, a padding mask, or "
        "both can be told from a slice. Let the "
        "model use is_causal=True instead of a mask of its own, or put the mask into the batch as "
        "(batch, 1, sequence, sequence), which "
        "is cut along its queries only"
    )
