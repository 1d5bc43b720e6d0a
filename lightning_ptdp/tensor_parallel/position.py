"""Position embedding under sequence parallelism."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.tensor_parallel.collectives import split_sequence
from lightning_ptdp.world.mesh import Group

__all__ = ["SequenceShardedEmbedding"]


class SequenceShardedEmbedding(nn.Module):
    """An embedding that all members hold whole and look up for their own slice of the sequence only.

    Its output is added to the word embeddings, which are split along the sequence. The weight's gradient covers the slice:
    it is partial over the group.

    Args:
        weight: The whole table (positions, h).
        padding_idx: Row whose gradient stays zero, as in ``nn.Embedding``.
        group: The tensor group.
    """

    def __init__(self, weight: nn.Parameter, *, padding_idx: int | None = None, group: Group) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.group = group
        self.weight = weight

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (s), (1, s) or (b, s) int64 -> (..., s/t, h).

        Raises:
            ValueError: s is not a multiple of t.
        """
        return F.embedding(split_sequence(positions, self.group, dim=-1), self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Full sizes and the split."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tensor_parallel_size={self.group.size}"
