"""Context parallelism: one sequence split over c ranks through the whole network.

See arXiv 2310.01889 and 2309.14509. The engine uses ``ContextParallel``:

- It cuts a batch (``sequence_chunks.py``, ``sequence_batch.py``).
- It replaces the model's attention by ring or all-to-all attention (``ring.py``, ``all_to_all.py``,
  ``intercept.py``, ``masks.py``).
- It gives the model the positions of its tokens (``global_positions.py``).

All other layers work on single tokens and need no change.
"""

from lightning_ptdp.context_parallel.all_to_all import all_to_all_attention, check_heads
from lightning_ptdp.context_parallel.context import ContextForward, ContextParallel
from lightning_ptdp.context_parallel.context_parallel_error import ContextParallelError
from lightning_ptdp.context_parallel.intercept import AttentionKind
from lightning_ptdp.context_parallel.models import why_not
from lightning_ptdp.context_parallel.ring import ring_attention
from lightning_ptdp.context_parallel.sequence_batch import (
    count_targets,
    sequence_length,
    shard_batch,
)
from lightning_ptdp.context_parallel.sequence_chunks import (
    check_sequence,
    gather_sequence,
    positions,
    shard_sequence,
    unshard_sequence,
)

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
