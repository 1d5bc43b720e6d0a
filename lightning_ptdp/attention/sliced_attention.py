"""Attention of a model that runs on a rank's slice of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_ptdp.attention.attention_protocol import AttentionCall, DistributedAttention
from lightning_ptdp.attention.context_parallel_error import ContextParallelError
from lightning_ptdp.attention.slice_masks import WholeMask, read_mask
from lightning_ptdp.forward.matrix_product import autocast_dtype

__all__ = ["SlicedAttention"]


@dataclass(kw_only=True)
class SlicedAttention:
    """Attention that takes the masks of slices; one object for each forward.

    Attributes:
        distributed: Attention over the full sequence.
        length: s, tokens of the full sequence.
        padded: True if the batch contains padding on any rank.
        differentiates: True if the forward began with gradients enabled.
        attended: True if it was called.
    """

    distributed: DistributedAttention
    length: int
    padded: bool
    differentiates: bool
    attended: bool = False
    _last: tuple[object, WholeMask | None, Tensor | None] = (None, None, None)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the results of this rank's queries over the full sequence; collective.

        Raises:
            ContextParallelError: The call has no meaning for a slice of the sequence.
        """
        q, k, v = call.q, call.k, call.v
        self._check(q, k, v)
        self.attended = True
        if q.dim() == 3:
            # One dimension for samples and heads: treat it as heads.
            q, k, v = q[None], k[None], v[None]
        dtype = autocast_dtype(q)
        q, k, v = (x if dtype is None else x.to(dtype) for x in (q, k, v))
        read = partial(
            read_mask,
            call.mask,
            is_causal=call.causal,
            q=q,
            kv_heads=k.size(1),
            group=self.distributed.group,
            padded=self.padded,
        )
        whole = read() if call.mask is None and not self.padded else self._read_once(read)
        # Surplus heads of this rank's call are copies, adjacent to each other.
        copies = k.size(1) // whole.kv_heads
        result = self.distributed(
            AttentionCall(
                q,
                k[:, ::copies],
                v[:, ::copies],
                causal=whole.causal,
                mask=whole.mask,
                scale=call.scale,
                dropout_p=call.dropout_p,
            )
        )
        return result[0] if call.q.dim() == 3 else result

    def _read_once(self, read: partial[WholeMask]) -> WholeMask:
        """Return the mask of a call, and read it only if the call before had another one.

        Reading waits for the device, and layers usually get the same mask."""
        (mask,), given = read.args, read.keywords
        identity = None if mask is None else (mask.data_ptr(), mask.shape, mask.stride())
        version = mask._version if mask is not None and not mask.is_inference() else None
        key = (identity, version, given["is_causal"], given["q"].size(0), given["kv_heads"])
        if key != self._last[0]:
            whole = read()
            is_reusable = whole.is_reusable and (mask is None or version is not None)
            # the mask is kept, so that no other one takes its place in memory
            self._last = (key if is_reusable else None, whole, mask)
        assert self._last[1] is not None
        return self._last[1]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        size = self.distributed.group.size
        local = self.length // size
        if query.dim() not in (3, 4):
            raise ContextParallelError(
                f"attention with queries of shape {tuple(query.shape)} cannot be split over "
                "context ranks. It must be (batch, heads, sequence, channels)"
            )
        lengths = (query.size(-2), key.size(-2), value.size(-2))
        if lengths != (local, local, local):
            raise ContextParallelError(
                f"attention with {lengths[0]} queries and {lengths[1]} keys cannot be split: "
                f"each of {size} context ranks has {local} of {self.length} tokens, and only "
                "self-attention over the batch's sequence can be split. Use "
                "context_parallel_size=1 for a key/value cache, cross-attention, or tokens "
                "that the model adds to the sequence"
            )
        if self.differentiates and not torch.is_grad_enabled():
            raise ContextParallelError(
                "attention runs with gradients disabled inside a forward with gradients "
                "enabled, as under a reentrant checkpoint. Its recomputation could not be "
                "intercepted. Use PTDPStrategy(recompute=...) or use_reentrant=False, and "
                "freeze parts of the model by requires_grad=False instead of no_grad"
            )
