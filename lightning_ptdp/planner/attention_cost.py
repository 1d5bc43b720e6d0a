"""Time and memory of one attention, for one microbatch on one rank.

Fused attention keeps one log-sum-exp per query and head instead of the s x s scores: 4 a / h
instead of 5 a s / h (arXiv 2205.05198, section 4)::

    n (q + 2 k)  queries, keys and values, n a fp32 log-sum-exps
    n a s        unfused: probabilities, the dropout's mask (1 byte) and result

On a CPU, attention with dropout is torch's composition of operations. It keeps its probabilities,
mask and result, and copies of queries, keys (one per query head) and values, all in fp32.
"""

from __future__ import annotations

from lightning_ptdp.attention import ATTENTIONS, AttentionTraffic
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import product_time
from lightning_ptdp.planner.shapes import AttentionShape

_MASK = 1
"""Bytes per element of a dropout's mask, on an accelerator."""
_LOG_SUM_EXP = 4
_SINGLE = 4
_FUSED_BACKWARD = 2.5
"""Ratio of the products in the backward of fused attention to those in its forward.

They are five and two (arXiv 2307.08691, section 3.1.2).
"""


def input_bytes(job: Job, choice: Choice, attention: AttentionShape) -> float:
    """Return the bytes of queries, keys and values."""
    heads, kv_heads = held_heads(choice, attention)
    values = attention.queries * heads * attention.head_dim
    values += attention.keys * kv_heads * (attention.head_dim + attention.value_dim)
    return choice.micro_batch_size * values / choice.c * job.precision.compute


def core_bytes(job: Job, choice: Choice, attention: AttentionShape) -> float:
    """Return the bytes that the attention keeps for its backward, including its inputs."""
    w = job.precision.compute
    heads, _ = attention.local_heads(choice.t)
    queries = choice.micro_batch_size * attention.queries / choice.c
    if job.fuses(attention):
        return input_bytes(job, choice, attention) + queries * heads * _LOG_SUM_EXP
    if job.device.kind == "cpu":
        keys = choice.micro_batch_size * attention.keys / choice.c
        copies = queries * heads * attention.head_dim + keys * heads * (
            attention.head_dim + attention.value_dim
        )
        return copies * _SINGLE + queries * heads * attention.keys * 3 * _SINGLE
    scores = queries * heads * attention.keys * (w + (w + _MASK if attention.dropout else 0))
    return input_bytes(job, choice, attention) + scores


def attention_time(
    job: Job, choice: Choice, attention: AttentionShape
) -> tuple[float, float, float, float]:
    """Return the seconds of an attention's passes, and the seconds of context parallelism.

    The result is (forward, backward, added to the forward, added to the backward).
    """
    device = job.device
    software = job.software
    width = job.precision.compute
    heads, _ = attention.local_heads(choice.t)
    queries = choice.micro_batch_size * attention.queries / choice.c
    if job.fuses(attention) and device.measured is not None:
        # Rates are measured with a causal mask, but given per operation of the whole square.
        square = (
            choice.micro_batch_size
            / choice.c
            * attention.flops
            * heads
            / attention.heads
            * (1 if attention.causal else 2)
        )
        speed = device.peak(width) / device.peak(4 if device.kind == "cpu" else 2)
        rate, rate_back = device.measured.attention_rates(attention.keys, attention.head_dim)
        forward = square / (rate * speed)
        backward = _FUSED_BACKWARD * square / (rate_back * speed)
    elif job.fuses(attention):
        work = 2 * queries * attention.keys * heads * (attention.head_dim + attention.value_dim)
        work /= 2 if software.skips_masked and attention.causal else 1
        tuned = device.tuned_attention_share if software.attention == "tuned" else None
        forward = work / (device.peak(width) * (tuned or device.attention_share) * device.sustained)
        backward = _FUSED_BACKWARD * forward
    else:
        batch = choice.micro_batch_size * heads
        rows = round(attention.queries / choice.c)
        scores = product_time(device, width, rows, attention.keys, attention.head_dim, batch)
        values = product_time(device, width, rows, attention.value_dim, attention.keys, batch)
        read, read_back = _traffic(job, choice, attention, queries * heads)
        forward = scores + values + read / device.stream
        # Each of a product's two gradients has the shape of this product or of the other one.
        backward = 2 * (scores + values) + read_back / device.stream
    return forward, backward, *exchange_time(job, choice, attention, forward, backward)


def _traffic(
    job: Job, choice: Choice, attention: AttentionShape, queries: float
) -> tuple[float, float]:
    """Return the bytes of the scores between the products of an attention that is not fused.

    They are read and written by masked softmax and dropout. ``queries`` are those of all heads of
    the rank. The result is (forward, backward).
    """
    w = job.precision.compute
    scores = queries * attention.keys
    dropped = 2 * w + _MASK if attention.dropout else 0
    # products of several heads need other orders of their operands and results
    results = 2 * w * queries * attention.value_dim
    moved = 2 * input_bytes(job, choice, attention)
    return scores * (2 * w + dropped) + results, scores * (3 * w + dropped) + results + moved


# ---- Cost of context parallelism in addition to the attention itself -----------------------------
#
# Each kind of attention estimates its own messages and operations (``attention/``).


def held_heads(choice: Choice, attention: AttentionShape) -> tuple[int, int]:
    """Return the heads of queries and of keys that a rank keeps for each of its positions."""
    heads, kv_heads = attention.local_heads(choice.t)
    kind = ATTENTIONS[choice.context_parallel_attention]
    return heads, kind.held_kv_heads(kv_heads, choice.c)


def exchange_operations(choice: Choice) -> int:
    """Return the number of additional operations that the host launches per attention forward."""
    c = choice.c
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
