"""Tensor and sequence parallelism: layer weights sharded over the tensor group.

See arXiv 1909.08053 and 2205.05198.

A ``ParallelPlan`` names the modules to split and the kind of each split. ``shard_module`` replaces
a module with its parallel version and returns a ``Placement`` for every parameter, which describes
the part of the full parameter that this rank holds (``tensor_shards.py``). The model's own code
does not change.
"""

from lightning_ptdp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from lightning_ptdp.tensor_parallel.kinds import (
    SPLIT_AXES,
    Alias,
    AttentionHeads,
    Column,
    Experts,
    Kind,
    ModulePlace,
    Partial,
    Position,
    Region,
    Row,
    Vocabulary,
    Whole,
    fits,
)
from lightning_ptdp.tensor_parallel.kinds.vocabulary import (
    SequenceShardedEmbedding,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ptdp.tensor_parallel.linear_cross_entropy import (
    DEFAULT_CHUNK_MB,
    check_chunk,
    linear_cross_entropy,
)
from lightning_ptdp.tensor_parallel.logits import VocabularyParallelLogits, gather_full
from lightning_ptdp.tensor_parallel.module_sharding import (
    check_captured,
    refuse_captured_parts,
    replace_aliases,
    shard_module,
    split_sequence,
)
from lightning_ptdp.tensor_parallel.named_modules import (
    PerCopy,
    PerRank,
    is_in_region,
    matches,
    set_numbers,
)
from lightning_ptdp.tensor_parallel.parallel_plan import ParallelPlan
from lightning_ptdp.tensor_parallel.randomness import SplitRandomness, give_randomness
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange

__all__ = [
    "DEFAULT_CHUNK_MB",
    "SPLIT_AXES",
    "Alias",
    "AttentionHeads",
    "Column",
    "ColumnParallelLinear",
    "Experts",
    "Kind",
    "ModulePlace",
    "ParallelPlan",
    "Partial",
    "PerCopy",
    "PerRank",
    "Position",
    "Region",
    "Row",
    "RowParallelLinear",
    "SequenceShardedEmbedding",
    "SplitRandomness",
    "Vocabulary",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "VocabularyParallelLogits",
    "VocabularyRange",
    "Whole",
    "check_captured",
    "check_chunk",
    "fits",
    "gather_full",
    "give_randomness",
    "is_in_region",
    "linear_cross_entropy",
    "matches",
    "refuse_captured_parts",
    "replace_aliases",
    "set_numbers",
    "shard_module",
    "split_sequence",
    "vocabulary_parallel_cross_entropy",
]
