"""Cost of context parallelism in addition to the attention itself.

Each kind of attention estimates its own messages and operations (``attention/``).
"""

from __future__ import annotations

from lightning_ptdp.attention import ATTENTIONS, AttentionTraffic
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import AttentionShape

__all__ = ["exchange_operations", "exchange_time", "held_heads"]


def held_heads(choice: Choice, attention: AttentionShape) -> tuple[int, int]:
    """Return the heads of queries and of keys that a rank keeps for each of its positions."""
    heads, kv_heads = attention.local_heads(choice.layout.tensor_parallel_size)
    kind = ATTENTIONS[choice.context_parallel_attention]
    return heads, kind.held_kv_heads(kv_heads, choice.layout.context_parallel_size)


def exchange_operations(choice: Choice) -> int:
    """Return the number of additional operations that the host launches per attention forward."""
    c = choice.layout.context_parallel_size
    return 0 if c == 1 else ATTENTIONS[choice.context_parallel_attention].operations(c)


def exchange_time(
    job: Job, choice: Choice, attention: AttentionShape, forward: float, backward: float
) -> tuple[float, float]:
    """Return the seconds that context parallelism adds to an attention's forward and backward.

    Args:
        job: Links, precision and software.
        choice: Layout and kind of exchange.
        attention: Attention of one layer.
        forward: Seconds of its forward on this rank.
        backward: Seconds of its backward on this rank.
    """
    group = group_link(choice.layout, job.cluster, "context")
    if group.size == 1:
        return 0.0, 0.0
    heads, kv_heads = held_heads(choice, attention)
    tokens = choice.micro_batch_size / group.size
    traffic = AttentionTraffic(
        size=group.size,
        queries=tokens * attention.queries * heads * attention.head_dim,
        results=tokens * attention.queries * heads * attention.value_dim,
        pairs=tokens * attention.keys * kv_heads * (attention.head_dim + attention.value_dim),
        width=job.precision.compute,
        causal=attention.causal,
        forward=forward,
        backward=backward,
        overlaps=job.overlaps,
        hop=lambda nbytes: group.start_s + group.send(nbytes),
        all_to_all=group.all_to_all,
        memory=job.device.stream,
    )
    return ATTENTIONS[choice.context_parallel_attention].seconds(traffic)
