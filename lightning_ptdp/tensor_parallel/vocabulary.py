"""Embedding and output head split along the vocabulary (arXiv 1909.08053, section 3).

Every member holds ceil(V / t) rows. If V does not divide, the last members' last rows are padding: zero, outside of every piece
of the sharding, never looked up, and never part of a loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.tensor_parallel.collectives import reduce, scatter_sequence
from lightning_ptdp.tensor_parallel.linear import column_linear
from lightning_ptdp.tensor_parallel.logits import VocabularyParallelLogits
from lightning_ptdp.tensor_parallel.sharding import VocabularyRange
from lightning_ptdp.weight_gradients import WeightGradients
from lightning_ptdp.world.mesh import Group

__all__ = ["VocabularyParallelEmbedding", "VocabularyParallelHead"]


class VocabularyParallelEmbedding(nn.Module):
    """Token ids (b, s) int64 -> (b, s, h), or (b, s/t, h) under sequence parallelism.

    Args:
        weight: This member's rows (ceil(V/t), h).
        vocabulary: Which rows they are.
        padding_idx: Token whose row gets no gradient, as in ``nn.Embedding``.
        group: The tensor group.
        sequence_parallel: Split the output along the sequence.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        vocabulary: VocabularyRange,
        padding_idx: int | None = None,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        assert weight.size(0) == vocabulary.rows, (tuple(weight.shape), vocabulary)
        self.num_embeddings, self.embedding_dim = vocabulary.size, weight.size(1)
        self.padded_vocabulary = vocabulary.padded
        self.vocabulary = vocabulary
        self.padding_idx = padding_idx
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up; every member contributes its own rows and zeros elsewhere.

        Raises:
            IndexError: An id is not in [0, V) (on CUDA a device-side assertion, as in ``nn.Embedding``).
            ValueError: (sequence parallelism) s is not a multiple of t.
        """
        words = self.vocabulary
        valid = (ids >= 0) & (ids < words.size)
        here = (ids >= words.start) & (ids < words.stop)
        # An id outside of the vocabulary becomes -1 on every member, so that the look-up itself complains.
        rows = torch.where(here, ids - words.start, torch.where(valid, 0, -1))
        x = F.embedding(rows, self.weight, self._local_padding_idx())
        x = x.masked_fill(~here.unsqueeze(-1), 0.0)
        return scatter_sequence(x, self.group) if self.sequence_parallel else reduce(x, self.group)

    def _local_padding_idx(self) -> int | None:
        words = self.vocabulary
        inside = self.padding_idx is not None and words.start <= self.padding_idx < words.stop
        return self.padding_idx - words.start if inside and self.padding_idx is not None else None

    def extra_repr(self) -> str:
        """Full sizes and the split."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padded_vocabulary={self.padded_vocabulary}, "
            f"tensor_parallel_size={self.group.size}, sequence_parallel={self.sequence_parallel}"
        )


class VocabularyParallelHead(nn.Module):
    """(..., h) -> logits (..., V), of which every member holds a slice: see ``VocabularyParallelLogits``.

    Args:
        weight: This member's rows (ceil(V/t), h); may be the embedding's.
        bias: This member's elements (ceil(V/t)), or None.
        vocabulary: Which rows they are.
        group: The tensor group.
        sequence_parallel: The input is split along the sequence: (b, s/t, h) -> (b, s, V).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        vocabulary: VocabularyRange,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        assert weight.size(0) == vocabulary.rows, (tuple(weight.shape), vocabulary)
        self.in_features, self.out_features = weight.size(1), vocabulary.size
        self.padded_vocabulary = vocabulary.padded
        self.vocabulary = vocabulary
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradients | None = None
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits that report the whole vocabulary."""
        local = column_linear(
            x,
            self.weight,
            self.bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            weight_gradients=self.weight_gradients,
        )
        if self.group.size == 1:
            return local
        return VocabularyParallelLogits.wrap(local, vocabulary=self.vocabulary, group=self.group)

    def extra_repr(self) -> str:
        """Full sizes and the split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"padded_vocabulary={self.padded_vocabulary}, tensor_parallel_size={self.group.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )
