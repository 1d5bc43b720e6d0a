"""Context parallelism: one sequence split over c ranks along time, through the whole network (arXiv 2310.01889, 2309.14509).

``ContextParallel`` is what the engine needs: it cuts a batch (``sharding.py``, ``batch.py``), puts ring or all-to-all attention in
the place of the model's own (``ring.py``, ``all_to_all.py``, ``intercept.py``, ``masks.py``), and hands the model the positions of its
tokens (``supply.py``). All other layers work on tokens one by one and do not notice.
"""

from lightning_ptdp.context_parallel.all_to_all import all_to_all_attention, check_heads
from lightning_ptdp.context_parallel.batch import count_targets, sequence_length, shard_batch
from lightning_ptdp.context_parallel.context import ContextForward, ContextParallel
from lightning_ptdp.context_parallel.errors import ContextParallelError
from lightning_ptdp.context_parallel.intercept import AttentionKind
from lightning_ptdp.context_parallel.models import why_not
from lightning_ptdp.context_parallel.ring import ring_attention
from lightning_ptdp.context_parallel.sharding import (
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
