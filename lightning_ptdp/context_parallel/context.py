"""Context parallelism of one rank: an object for the run, a context for each forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.attention import (
    ATTENTIONS,
    AttentionKind,
    ContextParallelError,
    FullMask,
    SlicedAttention,
    check_sequence,
    find_documents,
    known_mask,
    positions,
)
from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.context_parallel.global_positions import (
    PositionConsumer,
    SliceInputs,
    find_consumers,
)
from lightning_ptdp.context_parallel.sequence_batch import (
    SequenceDims,
    count_targets,
    may_hide,
    padding_masks,
    sequence_length,
    shard_batch,
)
from lightning_ptdp.context_parallel.slice_functions import SliceFunctions
from lightning_ptdp.forward.surroundings import Context, Contexts, Forward, Surrounding
from lightning_ptdp.forward.token_mixing import ATTENTION, TokenMixing, feature_sizes
from lightning_ptdp.shims.torch import has_compiled_parts
from lightning_ptdp.world.mesh import Group


@dataclass(kw_only=True)
class ContextForward(SliceInputs, SliceFunctions):
    """One forward on a slice of the sequence: its inputs, and its replaced functions.

    Attributes:
        batch: This rank's part of the batch, the argument of the step.
    """

    batch: Any

    @property
    def num_targets(self) -> Tensor | None:
        """Return this rank's number of labels that are not ignored, () int64.

        Available after the forward. None if the batch has none.
        """
        if self.shifted_targets is not None:
            return self.shifted_targets
        return count_targets(self.batch, self.length // self.group.size)

    def share(self, loss: Tensor) -> Tensor:
        """Return the weight of this rank's mean loss; collective.

        With these weights, the mean over the group is the mean over all labels. For a step that
        does not return ``num_tokens``; called on the ranks that have the loss. Without labels in
        the batch all ranks have the same weight, 1.
        """
        count = self.num_targets
        group = self.group
        if count is None:
            return loss.new_ones(())
        total = count.clone()
        dist.all_reduce(total, group=group.handle)
        return group.size * count.to(loss.dtype) / total.clamp(min=1)

    @contextlib.contextmanager
    def recomputable(self) -> Iterator[None]:
        """Allow attention in a checkpoint whose recomputation is intercepted."""
        outer = self.attention.is_recomputable
        self.attention.is_recomputable = True
        try:
            yield
        finally:
            self.attention.is_recomputable = outer

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Intercept the forward, or its recomputation, inside the context."""
        with self.attached(), self.mode():
            yield


@dataclass(kw_only=True)
class ContextParallel(Surrounding):
    """Cutting of batches along time, and attention across the cut.

    Args:
        group: The context group, preferably without other communication.
        attention: "ring" or "all_to_all".
        sequence_dims: See ``sequence_batch.py``.
        needs_positions: Refuse a model that does not accept the positions of its tokens in the full
            sequence. False for a model that needs no positions.
        sequence_parallel_size: t under sequence parallelism, else 1.
        attending: Stages that call attention.
        watches: Refuse functions that combine tokens, in the first forward of each kind.
        blocks: Names of this rank's blocks.
    """

    group: Group
    attention: AttentionKind = "ring"
    sequence_dims: SequenceDims = field(default_factory=dict)
    needs_positions: bool = True
    sequence_parallel_size: int = 1
    attending: Container[int] = (0,)
    watches: bool = True
    blocks: Collection[str] = ()
    _module: nn.Module | None = field(default=None, repr=False)
    _consumers: list[PositionConsumer] = field(default_factory=list, repr=False)
    _packed: bool = field(default=False, repr=False)
    _sizes: frozenset[int] = field(default=frozenset(), repr=False)
    _watched: set[tuple[str, int]] = field(default_factory=set, repr=False)
    _seen: dict[int, set[tuple[bool, int]]] = field(default_factory=dict, repr=False)
    _full: dict[tuple[int, int | None], Tensor] = field(default_factory=dict, repr=False)

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Store the module whose forwards are intercepted: the LightningModule, or a model."""
        self._module = module
        self._consumers = find_consumers(module)
        self._sizes = feature_sizes(module)
        self._watched.clear()
        self._seen.clear()
        return super().attach(module)

    @contextlib.contextmanager
    def around(self, forward: Forward) -> Iterator[None]:
        """Run ``forward`` of the attached module on this rank's slice.

        Collective. The batch has the full sequence and is the same on all ranks of the group. No
        backward may run inside.

        Raises:
            ValueError: The batch has no sequence, or a sequence that cannot be cut.
            ContextParallelError: The forward did something that a slice of the sequence does not
                support, called no attention that could be replaced although its stage has some, or
                cannot receive the positions of its tokens.
        """
        running = self._begin(forward.full_batch, self._seen.get(forward.stage, set()))
        running.shares_stream = lambda: forward.shares_stream
        forward.batch = running.batch
        forward.part = running
        with running.active(), self._watch(forward, running):
            yield
        self._check(running, expects_attention=forward.stage in self.attending)
        if running.attention.seen:
            self._seen.setdefault(forward.stage, running.attention.seen)

    def _watch(self, forward: Forward, running: ContextForward) -> Context:
        module = self._module
        if (
            module is None
            or not self.watches
            or forward.kind in self._watched
            or has_compiled_parts(module)
        ):
            return contextlib.nullcontext()
        self._watched.add(forward.kind)
        tokens = running.length // self.group.size
        watch = TokenMixing(
            lambda call: ContextParallelError(
                f"{call}, which combines tokens, but each of {self.group.size} context ranks has a "
                f"slice of {tokens} tokens. Only torch.nn.functional.scaled_dot_product_attention "
                "(Hugging Face: attn_implementation='sdpa'), x.sum(1) and x.mean(1) of (b, s, h) "
                "cover the whole sequence. Use these, or context_parallel_size=1"
            ),
            refused_positions=lambda call: ContextParallelError(
                f"{call}, but each of {self.group.size} context ranks has a slice of {tokens} "
                "tokens. Add a parameter position_ids to the module's forward, or position_ids "
                "(b, s) to the batch, and use these positions. Or use context_parallel_size=1"
            ),
            sizes=self._sizes,
            allowed=("sum", "mean", "__getitem__", *ATTENTION),
            averages={module.get_submodule(name) for name in self.blocks},
            tokens=tokens,
            samples=running.samples,
        )
        watch.length = running.length
        return watch

    def moved(self, before: Any, after: Any) -> None:
        """Record padding masks that hide nothing, while they can be read on the host."""
        here, there = (padding_masks(batch) for batch in (before, after))
        pairs = list(zip(here, there, strict=True)) if len(here) == len(there) else []
        self._full = {_identity(mask): mask for _, mask in pairs}  # no other gets their addresses
        for read, mask in pairs:
            if may_hide(read):
                self._full.pop(_identity(mask), None)

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Intercept the recomputation too, so that it attends over the full sequence."""
        assert isinstance(forward.part, ContextForward)
        return forward.part.recomputable(), forward.part.active()

    def _begin(self, batch: Any, seen: Collection[tuple[bool, int]]) -> ContextForward:
        length = sequence_length(batch, self.sequence_dims)
        size = self.group.size
        rank = self.group.rank
        check_sequence(length, size, sequence_parallel_size=self.sequence_parallel_size)
        local = shard_batch(
            batch, length=length, rank=rank, size=size, sequence_dims=self.sequence_dims
        )
        if (
            self.needs_positions
            and _given(batch) is None
            and not any(consumer.takes_positions for consumer in self._consumers)
        ):
            raise ContextParallelError(
                f"no module in {type(self._module).__name__} takes position_ids, and a model that "
                "counts positions itself would start from 0 on every context rank. Add a "
                "parameter position_ids to its forward, or put 'position_ids' (batch, "
                "sequence) into the batch and use them. If the model needs no positions, use "
                "context_parallel_positions=False"
            )
        pos_ids = positions(length, rank, size, device=next(iterate_tensors(local)).device)[None]
        masks = padding_masks(batch)
        padded = any(may_hide(mask) and _identity(mask) not in self._full for mask in masks)
        known = self._known(batch, seen, padded=padded)
        return ContextForward(
            batch=local,
            group=self.group,
            length=length,
            consumers=self._consumers,
            positions=pos_ids,
            documents=self._documents(batch),
            padding=_given(local, "attention_mask"),
            known=None if known is None else known_mask(pos_ids.device),
            samples=max(tensor.size(0) for tensor in iterate_tensors(local) if tensor.dim()),
            sizes=self._sizes,
            attention=SlicedAttention(
                distributed=ATTENTIONS[self.attention](self.group),
                length=length,
                padded=padded,
                differentiates=torch.is_grad_enabled(),
                known=known,
            ),
        )

    def _known(
        self, batch: Any, seen: Collection[tuple[bool, int]], *, padded: bool
    ) -> FullMask | None:
        """Return the mask of all attention calls, if the model builds it from the padding mask.

        The result is None if the first forward has not run yet, if it had attention calls of
        several kinds, or if the batch has other masks.
        """
        mask = _given(batch, "attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.dim() == 2
        if len(seen) != 1 or not (is_padding or mask is None):
            return None
        ((causal, kv_heads),) = seen
        visible = (mask != 0)[:, None, None] if padded and isinstance(mask, Tensor) else None
        return FullMask(causal=causal, kv_heads=kv_heads, mask=visible)

    def _documents(self, batch: Any) -> Tensor | None:
        """Return the document index of each token, (b, s) int64, or None.

        It is needed if the model separates documents by positions that restart. Until the first
        packed batch, one value per batch is read from the device. Later batches are assumed to be
        packed too, which does not change the result of a causal model.
        """
        places = _given(batch)
        if (
            not isinstance(places, Tensor)
            or batch.get("attention_mask") is not None
            or not any(consumer.reads_documents for consumer in self._consumers)
        ):
            return None
        documents = find_documents(places)
        self._packed = self._packed or bool(documents.any())
        return documents if self._packed else None

    def _check(self, running: ContextForward, *, expects_attention: bool) -> None:
        if running.shifts is not None and running.shifted_targets is None:
            raise running.shifts
        if expects_attention and not running.attention.attended:
            raise ContextParallelError(
                "the step called no attention that context parallelism could replace, so "
                "every rank attended only to its slice. The model must call "
                "torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
                "attn_implementation='sdpa'; not under torch.compile). Otherwise, use "
                "context_parallel_size=1"
            )
        if self.needs_positions and _given(running.batch) is None and not running.used:
            raise ContextParallelError(
                "the step called no module that takes position_ids, so positions started from "
                "0 on every context rank. Call such a module itself instead of its parts, or "
                "add 'position_ids' to the batch"
            )


def _given(batch: object, name: str = "position_ids") -> object:
    """Return the positions in a batch, or another value; None: it has none."""
    return batch.get(name) if isinstance(batch, Mapping) else None


def _identity(mask: Tensor) -> tuple[int, int | None]:
    """Return a key that all slices of a tensor share until it is changed."""
    version = None if mask.is_inference() else mask._version
    return mask.untyped_storage().data_ptr(), version
