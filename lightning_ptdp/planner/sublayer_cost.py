"""Time and memory of a layer's attentions and experts, for one microbatch on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_ptdp.attention import ATTENTIONS, AttentionTraffic
from lightning_ptdp.planner.communication import GroupLink, group_link, strided_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import PassTime, product_time, waits
from lightning_ptdp.planner.shapes import AttentionShape, ExpertShape

# ---- Attentions ----------------------------------------------------------------------------------
#
# Fused attention keeps one log-sum-exp per query and head instead of the s x s scores: 4 a / h
# instead of 5 a s / h (arXiv 2205.05198, section 4)::
#
#     n (q + 2 k)  queries, keys and values, n a fp32 log-sum-exps
#     n a s        unfused: probabilities, the dropout's mask (1 byte) and result
#
# On a CPU, attention with dropout is torch's composition of operations. It keeps its probabilities,
# mask and result, and copies of queries, keys (one per query head) and values, all in fp32.


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


def attention_time(job: Job, choice: Choice, attention: AttentionShape) -> PassTime:
    """Return the time of an attention's passes, with the waiting for context parallelism."""
    device = job.device
    software = job.software
    width = job.precision.compute
    heads, _ = attention.local_heads(choice.t)
    queries = choice.micro_batch_size * attention.queries / choice.c
    if job.fuses(attention) and device.measured is not None:
        # Rates are measured with a causal mask, but given per operation of the full square.
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
        work /= 2 if attention.causal else 1
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
    exchanged = exchange_time(job, choice, attention, forward, backward)
    return PassTime(forward=forward, backward=backward) + waits(*exchanged)


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


# ---- Experts of a mixture: exchanged rows, grouped products, copies ------------------------------
#
# With n tokens per rank and k experts per token, r = n k rows leave each rank. If the experts are
# equally busy, r rows arrive at each rank. The fullest rank receives ``imbalance`` times as many,
# and the other ranks wait for it. Shapes: h channels, f inner channels, E experts, e ranks that
# share them; w bytes per element::
#
#     all-to-all  r h w (e - 1) / e bytes leave a rank, four times: to the experts and back, and
#                 their gradients
#     products    E / e of them in one call, (r e / E, h) x (h, 2 f) and (r e / E, f) x (f, h):
#                 few rows each, many tiles in all
#     traffic     rows put into the order of the experts, and back into that of the tokens, once
#                 more after each exchange; activation; weighted sum
#     kept        received rows, 2 r h with the outputs that the weights' gradient needs; 3 r f


def rows(experts: ExpertShape, job: Job, choice: Choice) -> float:
    """Return r of one rank for equally busy experts.

    Each tensor-parallel rank sends its part of the tokens. If each rank holds a part of every
    expert, it sends all tokens.
    """
    tokens = choice.micro_batch_size * job.sequence_length / choice.c
    senders = choice.t // choice.layout.expert_tensor_parallel_size
    return experts.chosen * tokens / senders


def local_experts(experts: ExpertShape, choice: Choice) -> int:
    """Return E / e, the number of experts on a rank."""
    return experts.number // choice.layout.expert_parallel_size


def expert_link(job: Job, choice: Choice, axis: Literal["expert", "expert_replicas"]) -> GroupLink:
    """Return the ranks that share a layer's experts, or the ranks that hold the same experts.

    These are blocks of the data- and context-parallel ranks, one for each tensor-parallel rank. If
    the software folds experts, they are blocks of all ranks of a stage.
    """
    e = choice.layout.expert_parallel_size
    first = 1 if job.software.folds_experts else choice.t
    size, stride = (e, first) if axis == "expert" else (expert_shards(job, choice), first * e)
    return strided_link(size, stride, job.cluster)


def expert_shards(job: Job, choice: Choice) -> int:
    """Return the number of ranks that hold the same experts and sum their gradients."""
    folded = choice.t if job.software.folds_experts else 1
    return folded * choice.layout.size("expert_replicas")


def expert_time(experts: ExpertShape, job: Job, choice: Choice) -> PassTime:
    """Return the time of products, and of the all-to-alls of a forward; a backward has as many.

    ``expert_traffic`` counts the operations between them.
    """
    device = job.device
    width = job.precision.compute
    r = rows(experts, job, choice)
    num_local = local_experts(experts, choice)
    expert_rows = max(1, round(job.imbalance * r / num_local))
    forward = backward = weight = 0.0
    for outputs, inputs in _split(experts, choice).matrices:
        forward += product_time(device, width, expert_rows, outputs, inputs, num_local)
        gradient = job.trained * product_time(
            device, width, outputs, inputs, expert_rows, num_local
        )
        backward += product_time(device, width, expert_rows, inputs, outputs, num_local) + gradient
        weight += gradient
    group = expert_link(job, choice, "expert")
    sent = job.imbalance * r * experts.hidden * width
    return PassTime(
        forward=forward, backward=backward, weight=weight, dispatch=2 * group.all_to_all(sent)
    )


def _split(experts: ExpertShape, choice: Choice) -> ExpertShape:
    """Return the experts as a tensor-parallel rank holds them."""
    return replace(experts, width=experts.width // choice.layout.expert_tensor_parallel_size)


def expert_traffic(experts: ExpertShape, job: Job, choice: Choice) -> tuple[float, float]:
    """Return the bytes that a forward and its backward read and write around the products."""
    w = job.precision.compute
    r = rows(experts, job, choice)
    orders = 5 + (4 if choice.layout.expert_parallel_size > 1 else 0)
    moved = (orders * r + r / experts.chosen) * experts.hidden * w
    eager = job.software.elementwise == "eager"
    gated = (5, 9) if eager else (3, 5)
    active, active_back = gated if experts.gated else (2, 3)
    inner = r * _split(experts, choice).width * w
    return moved + active * inner, moved + active_back * inner


def expert_kept(experts: ExpertShape, job: Job, choice: Choice) -> float:
    """Return the bytes kept for the backward on the fullest rank."""
    w = job.precision.compute
    r = rows(experts, job, choice)
    inner = (3 if experts.gated else 2) * _split(experts, choice).width
    activations = job.imbalance * r * (experts.hidden + inner) * w
    return activations + r * experts.hidden * w


def expert_buffers(experts: ExpertShape, job: Job, choice: Choice) -> float:
    """Return the temporary bytes of experts.

    These are the sent and received rows during an exchange, and the widest gradients between
    products.
    """
    w = job.precision.compute
    r = rows(experts, job, choice)
    travelling = (
        (1 + job.imbalance) * r * experts.hidden * w
        if choice.layout.expert_parallel_size > 1
        else 0.0
    )
    return travelling + 2 * job.imbalance * r * _split(experts, choice).matrices[0][0] * w
