"""Cost of context parallelism in addition to the attention itself.

The cost consists of messages, the computation that hides them, and the merging of results. Ring
attention (``attention/ring.py``) works in c steps. Keys and values travel in all steps
except the last. Their gradients, in fp32, travel from the third step on and once more after the
last. A hop is hidden only by its own step's share of the attention, 1/c. Each step after the first
adds its result to the sum of the earlier ones, in fp32.

All-to-all attention (``attention/all_to_all.py``) hides nothing. It packs, sends and unpacks
queries, keys and values before the attention, and its result after it. The backward does the same.
"""

from __future__ import annotations

import math

from lightning_ptdp.planner.communication import GroupLink, group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import AttentionShape

__all__ = ["exchange_operations", "exchange_time", "held_heads"]

_SINGLE = 4
_RING_STEP, _TRADE = 20, 15
"""Number of operations of a ring step, and of the exchange of one tensor.

They are counted in the source. A ring step has slices, the sum of the log-sum-exps, factors,
products and sums. An exchange has parts, their stack, the exchange and the reordering.
"""
_HALVES = 0.75
"""Share of queries and keys that a step uses under a causal mask.

A step uses all queries and half of the keys, or half of the queries and all keys.
"""


def held_heads(choice: Choice, attention: AttentionShape) -> tuple[int, int]:
    """Return the heads of queries and of keys that a rank keeps for each of its positions.

    All-to-all attention copies key heads if there are fewer of them than ranks.
    """
    heads, kv_heads = attention.local_heads(choice.layout.tensor_parallel_size)
    if choice.context_parallel_attention == "all_to_all":
        kv_heads = math.lcm(kv_heads, choice.layout.context_parallel_size)
    return heads, kv_heads


def exchange_operations(choice: Choice) -> int:
    """Return the number of additional operations that the host launches per attention forward."""
    c = choice.layout.context_parallel_size
    if c == 1:
        return 0
    return 4 * _TRADE if choice.context_parallel_attention == "all_to_all" else (c - 1) * _RING_STEP


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
    queries = tokens * attention.queries * heads * attention.head_dim
    results = tokens * attention.queries * heads * attention.value_dim
    pairs = tokens * attention.keys * kv_heads * (attention.head_dim + attention.value_dim)
    if choice.context_parallel_attention == "all_to_all":
        traded = _trade(job, group, queries + pairs) + _trade(job, group, results)
        return traded, traded
    return _ring(job, group, attention, queries, results, pairs, forward, backward)


def _trade(job: Job, group: GroupLink, values: float) -> float:
    """Return the seconds to pack values, exchange them and order the received ones."""
    nbytes = values * job.precision.compute
    return group.all_to_all(nbytes) + 4 * nbytes / job.device.stream


def _ring(
    job: Job,
    group: GroupLink,
    attention: AttentionShape,
    queries: float,
    results: float,
    pairs: float,
    forward: float,
    backward: float,
) -> tuple[float, float]:
    c, width = group.size, job.precision.compute
    hop = group.start_s + group.send(pairs * width)
    home = group.start_s + group.send(pairs * _SINGLE)
    hides = job.overlaps
    there = (c - 1) * max(0.0, hop - hides * forward / c)
    travelling = [hop * (step < c - 1) + home * (step >= 2) for step in range(c)]
    back = home + sum(max(0.0, seconds - hides * backward / c) for seconds in travelling)

    seen = _HALVES if attention.causal else 1.0
    # The sum so far is scaled, the new part is scaled into its own tensor, and both are added.
    merged = (c - 1) * seen * (6 * _SINGLE + width) + 2 * (_SINGLE + width)
    # Each part is added to the gradients so far. These start as zeros and are finally cast to the
    # precision of the computation.
    added = (c - 1) * seen * (2 * _SINGLE + width) + 2 * (_SINGLE + width)
    return there + results * merged / job.device.stream, back + (
        queries + pairs
    ) * added / job.device.stream
