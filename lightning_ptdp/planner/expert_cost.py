"""Time and memory of a mixture's experts: exchanged rows, grouped products, copies.

With n tokens per rank and k experts per token, r = n k rows leave each rank. If the experts are
equally busy, r rows arrive at each rank. The fullest rank receives ``imbalance`` times as many, and
the other ranks wait for it. Shapes: h channels, f inner channels, E experts, e ranks that share
them; w bytes per element::

    all-to-all  r h w (e - 1) / e bytes leave a rank, four times: to the experts and back, and
                their gradients
    products    E / e of them in one call, (r e / E, h) x (h, 2 f) and (r e / E, f) x (f, h):
                few rows each, many tiles in all
    traffic     rows put into the order of the experts, and back into that of the tokens, once
                more after each exchange; activation; weighted sum
    kept        received rows, 2 r h with the outputs that the weights' gradient needs; 3 r f
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_ptdp.planner.communication import GroupLink, strided_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.pass_time import PassTime, product_time
from lightning_ptdp.planner.shapes import ExpertShape


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
