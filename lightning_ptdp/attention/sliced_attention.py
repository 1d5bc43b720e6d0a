"""Attention of a model that runs on a rank's slice of the sequence, and its masks.

A model builds masks from its slice of the tokens. Models build such a mask only from a length and a
padding mask. Two properties can therefore be read from it with certainty: *causal or not*, and
*which of the local tokens are visible*. The visible tokens are gathered over the ranks. Any other
mask between local tokens is refused, because it says nothing about the tokens of other ranks. A
mask cut from the batch, with local queries and all keys, is used as it is.

Shapes: b samples, n heads, s tokens in the full sequence, s/c local tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from lightning_ptdp.attention.attention_protocol import (
    AttentionCall,
    ContextParallelError,
    DistributedAttention,
)
from lightning_ptdp.attention.sequence_chunks import unshard_sequence
from lightning_ptdp.forward.matrix_product import autocast_dtype
from lightning_ptdp.shims.torch import is_recomputed_later
from lightning_ptdp.shims.torch_distributed import all_gather_single

_BIDIRECTIONAL = 1
_CAUSAL = 2
_BIASED = 4
"""Bits of what a mask may be; none: it cannot be used. A mask of only padding fits two of them."""


@dataclass(frozen=True, kw_only=True)
class FullMask:
    """Mask of an attention call, for the full sequence.

    Attributes:
        causal: True if a token attends only to itself and earlier tokens of the full sequence.
        kv_heads: Number of key/value heads of the call. Some models copy these heads if they pass a
            mask; the smallest number over the ranks counts.
        mask: Further restriction of the visible keys, (b or 1, n or 1, s/c or 1, s), boolean or
            additive, in the order of the full sequence.
        is_reusable: True if later calls with the same mask need not be read. If only some ranks
            passed a mask, they may make a new one for each call, and all ranks must agree again.
    """

    causal: bool
    kv_heads: int
    mask: Tensor | None = None
    is_reusable: bool = True


@dataclass(kw_only=True)
class SlicedAttention:
    """Attention that takes the masks of slices; one object for each forward.

    Attributes:
        distributed: Attention over the full sequence.
        length: s, tokens of the full sequence.
        padded: True if the batch has a padding mask, which may hide tokens.
        differentiates: True if the forward began with gradients enabled.
        known: Mask for the calls of a model that was given ``known_mask``.
        attended: True if it was called.
        seen: Calls with a mask of the slice or none: causal or not, and number of key/value heads.
        is_recomputable: True where the recomputation of a checkpoint is intercepted as well.
    """

    distributed: DistributedAttention
    length: int
    padded: bool
    differentiates: bool
    known: FullMask | None = None
    attended: bool = False
    seen: set[tuple[bool, int]] = field(default_factory=set)
    is_recomputable: bool = False
    _last: tuple[object, FullMask | None, Tensor | None] = (None, None, None)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the results of this rank's queries over the full sequence; collective.

        Raises:
            ContextParallelError: The call has no meaning for a slice of the sequence.
        """
        q = call.q
        k = call.k
        v = call.v
        self._check(q, k, v)
        self.attended = True
        if q.dim() == 3:
            # One dimension for samples and heads: treat it as heads.
            q = q[None]
            k = k[None]
            v = v[None]
        dtype = autocast_dtype(q)
        q, k, v = (x if dtype is None else x.to(dtype) for x in (q, k, v))
        full_mask = self._full_mask(call, q.size(0), k.size(1))
        is_own = call.mask is None or call.mask.size(-1) == q.size(2)
        # Compiled code would be compiled again for another form of the mask.
        if is_own and not torch.compiler.is_compiling():
            self.seen.add((full_mask.causal, full_mask.kv_heads))
        # Surplus heads of this rank's call are copies, adjacent to each other.
        copies = k.size(1) // full_mask.kv_heads
        result = self.distributed(
            AttentionCall(
                q,
                k[:, ::copies],
                v[:, ::copies],
                causal=full_mask.causal,
                mask=full_mask.mask,
                scale=call.scale,
                dropout_p=call.dropout_p,
            )
        )
        return result[0] if call.q.dim() == 3 else result

    def _full_mask(self, call: AttentionCall, samples: int, kv_heads: int) -> FullMask:
        """Return the mask of a call, and read it only if the call before had another one.

        Reading waits for the device, and layers usually get the same mask."""
        mask = call.mask
        if mask is None and not self.padded:
            return FullMask(causal=call.causal, kv_heads=kv_heads)
        if self.known is not None and _is_known(mask):
            return self.known
        identity = None if mask is None else (mask.data_ptr(), mask.shape, mask.stride())
        version = mask._version if mask is not None and not mask.is_inference() else None
        key = (identity, version, call.causal, samples, kv_heads)
        if key != self._last[0]:
            full_mask = self._read(call, samples, kv_heads)
            is_reusable = full_mask.is_reusable and (mask is None or version is not None)
            # the mask is kept, so that no other one takes its place in memory
            self._last = (key if is_reusable else None, full_mask, mask)
        assert self._last[1] is not None
        return self._last[1]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        size = self.distributed.group.size
        local = self._local
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
        if self.differentiates and is_recomputed_later(by_us=self.is_recomputable):
            raise ContextParallelError(
                "attention runs inside torch.utils.checkpoint or the forward of another "
                "torch.autograd.Function, whose recomputation cannot be intercepted. Turn the "
                "model's own checkpointing off, and use PTDPStrategy(recompute='full')"
            )

    def _read(self, call: AttentionCall, samples: int, kv_heads: int) -> FullMask:
        """Read the mask of a call; collective if the batch has a padding mask.

        Some ranks may then pass a mask that ranks without padding in their slice leave out, so all
        ranks must agree.

        Raises:
            ContextParallelError: The mask has no meaning for the full sequence.
        """
        mask = call.mask
        local = self._local
        if mask is None:
            visible = torch.ones(samples, local, dtype=torch.int32, device=call.q.device)
            kind = _CAUSAL if call.causal else _BIDIRECTIONAL
            return self._agree(visible, (kind, kv_heads, False), "")
        if call.causal:
            raise ContextParallelError(
                "scaled_dot_product_attention accepts attn_mask or is_causal=True, but not both"
            )
        if mask.requires_grad:
            raise ContextParallelError(
                "context parallelism does not compute gradients of an attention mask or bias. "
                "Use context_parallel_size=1"
            )
        mask = mask[(None,) * (4 - mask.dim())]
        description = f"an attention mask of shape {tuple(mask.shape)}"
        if mask.size(-2) in (1, local) and mask.size(-1) == self.length:
            return FullMask(causal=False, mask=mask, kv_heads=kv_heads)
        if mask.size(-2) not in (1, local) or mask.size(-1) != local:
            raise self._refusal(description)
        kinds, keys = _classify(mask)
        if self.padded:
            visible = keys.to(call.q.device, torch.int32).expand(samples, -1)
            return self._agree(visible, (kinds, kv_heads, True), description)
        kind, all_visible = torch.stack((kinds, keys.all())).tolist()
        self._check_kinds([kind], description)
        if not all_visible:
            raise ContextParallelError(
                "the model masks some tokens as padding, but the batch has no padding mask, so "
                "the other ranks do not know these tokens. Add a mask of shape (batch, sequence) "
                "to the batch as 'attention_mask', 'key_padding_mask' or 'padding_mask'"
            )
        return FullMask(causal=kind == _CAUSAL, kv_heads=kv_heads)

    def _agree(
        self, keys: Tensor, own: tuple[Tensor | int, int, bool], description: str
    ) -> FullMask:
        """Combine the ranks' visible keys (b, s/c) int32 and agree on the kind of mask.

        It reads values back once. ``own`` holds the possible kinds of this rank's mask, its number
        of key/value heads, and whether there is a mask. A slice of only padding fits both causal
        and bidirectional masks. The other ranks decide then.
        """
        group = self.distributed.group
        samples, length = keys.shape
        numbers = [
            number if isinstance(number, Tensor) else keys.new_full((), number) for number in own
        ]
        message = torch.cat((keys, torch.stack(numbers).expand(samples, -1)), 1)
        gathered = message.new_empty(group.size * samples, length + 3)
        all_gather_single(gathered, message, group.handle)
        parts = gathered.view(group.size, samples, length + 3)
        full = unshard_sequence(list(parts[..., :length].bool()), 1)
        *fields, all_visible = torch.cat(
            (parts[:, 0, length:].flatten(), full.all()[None])
        ).tolist()
        kinds = fields[::3]
        self._check_kinds(kinds, description or "the attention mask of another rank")
        common = reduce(and_, kinds)
        if not common:
            raise ContextParallelError(
                "in the same attention call, some ranks of a context group used causal attention "
                "and others bidirectional attention, because the model decides by the values of "
                "its slice. Pass is_causal explicitly"
            )
        return FullMask(
            causal=bool(common & _CAUSAL),
            mask=None if all_visible else full[:, None, None],
            kv_heads=min(fields[1::3]),
            is_reusable=len({*fields[2::3]}) == 1,
        )

    def _check_kinds(self, kinds: list[int], description: str) -> None:
        """Check that the masks of all ranks have a meaning for the full sequence.

        Raises:
            ContextParallelError: One has none.
        """
        if _BIASED in kinds:
            raise self._refusal(
                "the attention mask has values other than 0 and -inf, for example a "
                "position-dependent bias. A rank knows them only for its own slice of the "
                f"sequence; {description}"
            )
        if 0 in kinds:
            raise self._refusal(description)

    def _refusal(self, description: str) -> ContextParallelError:
        size = self.distributed.group.size
        return ContextParallelError(
            f"{description} cannot be used under context parallelism. "
            f"Each of {size} ranks has {self._local} of {self.length} tokens, from which only "
            "causal and padding masks can be derived. Use is_causal=True instead of a mask, or add "
            "the mask to the batch as (batch, 1, sequence, sequence), which is split along its "
            "queries only"
        )

    @property
    def _local(self) -> int:
        """Return the number of tokens of a rank."""
        return self.length // self.distributed.group.size


def _classify(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Classify a mask between local tokens, without reading a value back.

    Returns:
        What it may be, () int32, and which tokens are visible, (b or 1, s/c) boolean.
    """
    visible = mask
    biased = torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dtype is not torch.bool:
        visible = mask == 0
        hidden = mask < torch.finfo(mask.dtype).min / 2
        biased = ~(visible | hidden).all()
    keys = visible[:, :1, -1:]
    kind = (visible == keys).all() * _BIDIRECTIONAL
    if visible.size(-2) > 1:
        kind = kind + (visible == keys.expand_as(visible).tril()).all() * _CAUSAL
    return torch.where(biased, _BIASED, kind).to(torch.int32), keys[:, 0, 0]


def known_mask(device: torch.device) -> Tensor:
    """Return a mask (1, 1, 1, 1) in place of one whose meaning is known for the full sequence.

    Models take a mask with four dimensions as it is. They neither read it nor make another one.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _is_known(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape == (1, 1, 1, 1)
