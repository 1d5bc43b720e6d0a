"""Embeddings and the output head, split along the vocabulary or along the sequence.

A vocabulary-parallel module (arXiv 1909.08053, section 3) holds ceil(V / t) rows of the vocabulary
on every rank. If V is not a multiple of t, the last rows of the last ranks are padding. Padding
rows are zero, belong to no piece of the sharding, are never looked up, and never contribute to a
loss.

A sequence-sharded embedding is looked up for a slice of the sequence only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.collectives import reduce, scatter_sequence, split_sequence
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_embedding, shape_text
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, ParallelLayer
from lightning_ptdp.tensor_parallel.logits import VocabularyParallelLogits
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange, shard_vocabulary
from lightning_ptdp.world.mesh import Group


class VocabularyParallelEmbedding(ParallelLayer):
    """Token ids (b, s) int64 -> (b, s, h), or (b, s/t, h) under sequence parallelism.

    Args:
        weight: This rank's rows (ceil(V/t), h).
        vocabulary: The range of this rank's rows.
        padding_idx: Token whose row gets no gradient, as in ``nn.Embedding``.
        group: The tensor group.
        sequence_parallel: Split the output along the sequence.
    """

    shown = ("num_embeddings", "embedding_dim", "padded_vocabulary")
    # attributes of nn.Embedding that adapters read
    max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        vocabulary: VocabularyRange,
        padding_idx: int | None = None,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(group=group, sequence_parallel=sequence_parallel)
        assert weight.size(0) == vocabulary.rows, (tuple(weight.shape), vocabulary)
        self.num_embeddings = vocabulary.size
        self.embedding_dim = weight.size(1)
        self.vocabulary = vocabulary
        self.padded_vocabulary = vocabulary.padded
        self.padding_idx = padding_idx
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the embeddings; every rank contributes its own rows and zeros elsewhere.

        Raises:
            IndexError: An id is not in [0, V) (on CUDA a device-side assertion, as in
                ``nn.Embedding``).
            ValueError: s is not a multiple of t (sequence parallelism only).
        """
        words = self.vocabulary
        padding = self.padding_idx
        valid = (ids >= 0) & (ids < words.size)
        local = (ids >= words.start) & (ids < words.stop)
        # Map an id outside of the vocabulary to -1 on every rank, so that the look-up itself fails.
        rows = torch.where(local, ids - words.start, torch.where(valid, 0, -1))
        padding_row = (
            padding - words.start
            if padding is not None and words.start <= padding < words.stop
            else None
        )
        x = F.embedding(rows, self.weight, padding_row).masked_fill(~local.unsqueeze(-1), 0.0)
        return scatter_sequence(x, self.group) if self.sequence_parallel else reduce(x, self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """(..., h) -> logits (..., V), of which every rank holds a slice.

    The result is a ``VocabularyParallelLogits``.

    Args:
        weight: This rank's rows (ceil(V/t), h); may be the embedding's.
        bias: This rank's elements (ceil(V/t)), or None.
        vocabulary: The range of this rank's rows.
        group: The tensor group.
        sequence_parallel: The input is split along the sequence: (b, s/t, h) -> (b, s, V).
    """

    shown = (*ParallelLayer.shown, "padded_vocabulary")

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        vocabulary: VocabularyRange,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(weight, bias, group=group, sequence_parallel=sequence_parallel)
        assert weight.size(0) == vocabulary.rows, (tuple(weight.shape), vocabulary)
        self.vocabulary = vocabulary
        self.padded_vocabulary = vocabulary.padded
        self.out_features = vocabulary.size

    def forward(self, x: Tensor) -> Tensor:
        """Return logits that report the full vocabulary as their shape."""
        local = self.column(x, self.weight, self.bias)
        if self.group.size == 1:
            return local
        return VocabularyParallelLogits.wrap(local, vocabulary=self.vocabulary, group=self.group)


class SequenceShardedEmbedding(ParallelLayer):
    """A replicated position embedding, looked up for this rank's slice of the sequence.

    Its output is added to the word embeddings, which are split along the sequence. The weight's
    gradient covers only the slice, so it is partial over the group.

    Args:
        weight: The full table (positions, h).
        padding_idx: Row whose gradient stays zero, as in ``nn.Embedding``.
        group: The tensor group.
    """

    shown = ("num_embeddings", "embedding_dim")

    def __init__(
        self, weight: nn.Parameter, *, padding_idx: int | None = None, group: Group
    ) -> None:
        super().__init__(group=group, sequence_parallel=True)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.weight = weight

    def forward(self, positions: Tensor) -> Tensor:
        """Look up positions (s), (1, s) or (b, s) int64 -> (..., s/t, h).

        Raises:
            ValueError: s is not a multiple of t.
        """
        return F.embedding(
            split_sequence(positions, self.group, dim=-1), self.weight, self.padding_idx
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Kind):
    """``nn.Embedding`` or the ``nn.Linear`` of the output head, split by token.

    The vocabulary is padded if it does not divide.
    """

    name = "vocabulary"
    takes = "nn.Embedding or nn.Linear"
    types = (nn.Embedding, nn.Linear)
    pads = True

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_embedding(name, module, size)

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        words = _words(module, place)
        return {
            name: shard_vocabulary(parameter.shape, words)
            for name, parameter in module.named_parameters()
        }

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        weight = local["weight"]
        options = {"vocabulary": _words(module, place), **place.layer_options}
        if isinstance(module, nn.Embedding):
            return VocabularyParallelEmbedding(weight, padding_idx=module.padding_idx, **options)
        return VocabularyParallelHead(weight, local.get("bias"), **options)

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text((f"ceil({shape[0]}/t)", *shape[1:])), "vocabulary: split by token"


@dataclass(frozen=True, kw_only=True)
class Position(Kind):
    """``nn.Embedding`` of positions, held whole by every rank.

    Under sequence parallelism each rank looks up its own slice of the sequence.
    """

    name = "position"
    sharding = f"position: {Kind.sharding}"
    takes = "nn.Embedding"
    types = (nn.Embedding,)
    ties = "whole"

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_embedding(name, module, size)

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        if not place.sequence_parallel:
            return module
        return SequenceShardedEmbedding(
            local["weight"], padding_idx=module.padding_idx, group=place.group
        )


def _words(module: nn.Module, place: ModulePlace) -> VocabularyRange:
    return VocabularyRange(
        size=module.get_parameter("weight").size(0), parts=place.group.size, index=place.group.rank
    )
