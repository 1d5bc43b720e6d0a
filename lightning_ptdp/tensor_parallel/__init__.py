"""Tensor and sequence parallelism: one layer's matrices spread over the ranks of the tensor group (arXiv 1909.08053, 2205.05198).

A ``ParallelPlan`` says which modules are split and how; ``apply_plan`` (a whole model) or ``shard_module`` (one module) put parallel
ones in their place; a ``Sharding`` tells of every parameter which part of the whole it is. The model's own code does not change.
"""

from lightning_ptdp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from lightning_ptdp.tensor_parallel.kinds import Column, Kind, Partial, Position, Row, Vocabulary
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ptdp.tensor_parallel.logits import VocabularyParallelLogits, gather_full
from lightning_ptdp.tensor_parallel.plan import ParallelPlan
from lightning_ptdp.tensor_parallel.position import SequenceShardedEmbedding
from lightning_ptdp.tensor_parallel.sharding import (
    Piece,
    Sharding,
    VocabularyRange,
    assemble_full,
    iterate_pieces,
    slice_full,
)
from lightning_ptdp.tensor_parallel.swap import apply_plan, shard_module
from lightning_ptdp.tensor_parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "Kind",
    "ParallelPlan",
    "Partial",
    "Piece",
    "Position",
    "Row",
    "RowParallelLinear",
    "SequenceShardedEmbedding",
    "Sharding",
    "Vocabulary",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "VocabularyParallelLogits",
    "VocabularyRange",
    "apply_plan",
    "assemble_full",
    "gather_full",
    "iterate_pieces",
    "shard_module",
    "slice_full",
    "vocabulary_parallel_cross_entropy",
]
