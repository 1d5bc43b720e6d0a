"""Context parallelism: one sequence split over c ranks through the whole network.

See arXiv 2310.01889 and 2309.14509. The engine uses ``ContextParallel``:

- It cuts a batch (``sequence_batch.py``).
- It replaces the model's attention and other functions of torch (``slice_functions.py``).
- It gives the model the positions of its tokens (``global_positions.py``).

All other layers work on single tokens and need no change.
"""

from lightning_ptdp.attention.all_to_all import all_to_all_attention, check_heads
from lightning_ptdp.attention.context_parallel_error import ContextParallelError
from lightning_ptdp.attention.ring import ring_attention
from lightning_ptdp.attention.sequence_chunks import (
    check_sequence,
    gather_sequence,
    positions,
    shard_sequence,
    unshard_sequence,
)
from lightning_ptdp.context_parallel.context import ContextForward, ContextParallel
from lightning_ptdp.context_parallel.models import why_not
from lightning_ptdp.context_parallel.sequence_batch import (
    count_targets,
    sequence_length,
    shard_batch,
)
from lightning_ptdp.context_parallel.slice_functions import AttentionKind

__all__ = [
    "AttentionKind",
    "ContextForward",
    "ContextParallel",
    "ContextParallelError",
    "all_to_all_attention",
    "check_heads",
    "check_sequence",
    "count_targets",
    "gather_sequence",
    "positions",
    "ring_attention",
    "sequence_length",
    "shard_batch",
    "shard_sequence",
    "unshard_sequence",
    "why_not",
]
