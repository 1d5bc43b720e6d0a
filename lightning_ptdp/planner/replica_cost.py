"""Memory and time of state that is sharded over replicas, and of the optimizer's step.

Replicas sum gradients, and may shard optimizer states, gradients and parameters (ZeRO). The sharded
parameters (FSDP, ZeRO-3) of a layer are gathered before its forward and before its backward, while
the previous layer runs, and copied to where the layer reads them. Its gradients are reduced and
scattered once per microbatch (torch's FSDP2: foreach_all_gather, foreach_reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_ptdp.planner.communication import GroupLink, group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import LayerShape
from lightning_ptdp.planner.sublayer_cost import expert_link, expert_shards


def static_bytes(
    job: Job, choice: Choice, parameters: float, experts: float = 0.0
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state.

    These bytes do not depend on the microbatches. With a sharded optimizer, a rank keeps the state
    of 1/(d c) of its parameters: 6 + 12/d bytes per parameter in half precision. With sharded
    gradients it keeps 1/(d c) of these too, 2 + 16/d bytes, and with sharded parameters 18/d.
    Experts are held by d c / e ranks each, so a rank keeps e/(d c) of theirs.

    Args:
        job: Precision and software.
        choice: Layout and sharding.
        parameters: Number of parameters on the rank.
        experts: Number of expert parameters among them.
    """
    precision = job.precision
    layout = choice.layout
    shards, of_experts = (
        (layout.size("replica_sum"), expert_shards(job, choice))
        if is_sharded(job, choice)
        else (1, 1)
    )
    gradient = job.gradient + job.software.gradient_copy
    stepped = (parameters - experts) / shards + experts / of_experts
    if shards_parameters(job, choice):
        parameters = stepped
    return (
        parameters * precision.weight,
        job.trained * (stepped if choice.shard == "gradients" else parameters) * gradient,
        0.0 if job.offloads_optimizer else job.trained * stepped * precision.state,
    )


def is_sharded(job: Job, choice: Choice) -> bool:
    """Return True if at least the optimizer's state is sharded over the replicas."""
    return choice.shard != "none" or job.software.shards != "none"


def gathered_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of a layer's gathered parameters on one tensor-parallel rank."""
    count = layer.parameters.on(choice.t) + layer.expert_parameters(choice.layout)
    if choice.shard == "parameters":
        return count * job.precision.weight
    return count * (1 if job.software.float8 else job.precision.compute)


def shards_parameters(job: Job, choice: Choice) -> bool:
    """Return True if the parameters are sharded over the replicas."""
    return choice.shard == "parameters" or job.software.shards != "none"


def gathers_layers(job: Job, choice: Choice) -> bool:
    """Return True if parameters are gathered layer by layer, not by the chunks of a pipeline."""
    by_layers = choice.shard == "parameters" and choice.p == 1
    return job.software.shards != "none" or by_layers


def unsharded_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of the layers that are unsharded at a time.

    They are the parameters of the current layer and of the next, and gradients to scatter.
    """
    return 3 * gathered_bytes(job, choice, layer) if gathers_layers(job, choice) else 0.0


def num_gathers(choice: Choice) -> int:
    """Return how often the chunks of a rank are gathered in a step.

    A rank holds two gathered chunks at a time. If it has more chunks, each is gathered again for
    every group of p microbatches, in the forward and in the backward.
    """
    v = choice.v
    return v if v <= 2 else 2 * v * -(-choice.num_microbatches // choice.p)


def kept_unsharded_bytes(
    job: Job, choice: Choice, stages: Sequence[int], parameters: float
) -> float:
    """Return the bytes of a rank that stay unsharded between layers.

    These are the parameters of two chunks of a pipeline, and the gradients of one of several
    chunks; or the tables, which stay unsharded for the step.
    """
    if choice.shard != "parameters":
        return 0.0
    if not gathers_layers(job, choice):
        chunks = len(stages)
        gradients = job.gradient if chunks > 1 else 0
        return parameters / chunks * (min(2, chunks) * job.precision.weight + gradients)
    last = choice.layout.num_stages - 1
    tables = job.shape.input.table_elements(choice.t) if 0 in stages else 0
    if last in stages and not (job.shape.tied and 0 in stages):
        tables += job.shape.head.table_elements(choice.t)
    return tables * job.precision.weight


def sharding_time(
    job: Job, choice: Choice, layer: LayerShape, forward: float, backward: float
) -> tuple[float, float]:
    """Return the additional seconds of a layer's forward and backward.

    Args:
        job: Links, precision and software.
        choice: Layout.
        layer: The layer with the parameters.
        forward: Seconds of the previous layer's forward, which hides the gathering.
        backward: Seconds of the previous layer's backward, which hides gathering and scattering.
    """
    group = group_link(choice.layout, job.cluster, "replica_sum")
    if not gathers_layers(job, choice) or group.size == 1:
        return 0.0, 0.0
    regathers = 0
    if job.software.shards == "modules":
        group = replace(group, link=group.hop)
        regathers = int(choice.recompute == "full")
    nbytes = gathered_bytes(job, choice, layer)
    gather = group.all_gather(nbytes)
    scatter = group.all_gather(
        nbytes * job.gradient / (1 if job.software.float8 else job.precision.compute)
    )
    hides = job.software.hides_gradients and job.overlaps
    copied = 2 * nbytes / job.device.stream
    collectives = (1 + regathers) * gather + scatter
    return copied + max(0.0, gather - hides * forward), (1 + regathers) * copied + max(
        0.0, collectives - hides * backward
    )


def gradients_time(
    job: Job, choice: Choice, parameters: int, experts: int, *, hiding_s: float
) -> float:
    """Return the exposed seconds to sum the gradients over the replicas.

    The sum is an all-reduce. With a sharded optimizer, it is a reduce-scatter and an all-gather of
    the parameters. Sharded gradients are scattered after every microbatch. Gradients of ``experts``
    are summed over the ranks with the same experts. They are also summed over the tensor-parallel
    ranks if each of these had a part of the tokens.
    """
    layout = choice.layout
    replicas = group_link(layout, job.cluster, "replica_sum")
    sums = (
        (replicas, parameters - experts),
        (expert_link(job, choice, "expert_replicas"), experts),
    )
    weight = job.precision.weight
    gradient = job.gradient

    def seconds(collective: Callable[[GroupLink, float], float], width: int) -> float:
        return sum(collective(group, job.trained * count * width) for group, count in sums)

    tied = 0.0
    if job.shape.tied and layout.last_stage_rank != layout.rank_of_stage(0):
        rows, columns = job.shape.head.table
        # Two ranks exchange the full table, in both directions at once.
        tied = group_link(layout, job.cluster, "pipeline").send(
            job.trained * rows / choice.t * columns * gradient
        )
    if experts and layout.expert_tensor_parallel_size == 1 and not job.software.folds_experts:
        tied += group_link(layout, job.cluster, "tensor").all_reduce(
            job.trained * experts * gradient
        )
    # those of layers are part of their passes; nothing hides those of tables
    if gathers_layers(job, choice):
        table = job.shape.input.table_elements(choice.t)
        return tied + replicas.all_gather(table * weight) + replicas.all_gather(table * gradient)
    if choice.shard == "none":
        return tied + _exposed(seconds(GroupLink.all_reduce, gradient), choice, hiding_s)
    scattered = seconds(GroupLink.all_gather, gradient)
    gathered = seconds(GroupLink.all_gather, weight)
    earlier = choice.num_microbatches - 1 if choice.shard != "optimizer" else 0
    if choice.shard == "parameters":
        # A computation of one chunk hides the gather of the next; nothing hides the first one.
        chunk = gathered / choice.v
        later = max(0.0, chunk - hiding_s / choice.v / 2)
        exposed = chunk + (num_gathers(choice) - 1) * later
    else:
        exposed = _exposed(gathered, choice, hiding_s / 2)
    exposed += earlier * max(0.0, scattered - hiding_s) + _exposed(scattered, choice, hiding_s)
    return tied + exposed


def _exposed(seconds: float, choice: Choice, pass_s: float) -> float:
    """Return the seconds of a reduction that a pass of ``pass_s`` seconds does not hide.

    The reduction starts in the last microbatch's pass, half of which hides it. With several chunks,
    each chunk runs its last p microbatches before those of another chunk, which hide its reduction.
    Only its own pass hides the reduction of the last chunk.
    """
    p = choice.p
    v = choice.v
    if v == 1:
        return max(0.0, seconds - pass_s / 2)
    return max(seconds - pass_s * p * (v - 1) / v, seconds / v - pass_s / (2 * v), 0.0)


def optimizer_time(job: Job, choice: Choice, parameters: int, experts: int) -> float:
    """Return the seconds of the optimizer's step, by the bytes that it reads and writes.

    By default, weights and state are read and written once. Gradients count twice, because their
    norm is computed, too.
    """
    *_, state = static_bytes(job, choice, parameters, experts)
    stepped = state / job.precision.state
    stream = job.device.stream if job.device.measured is None else job.device.measured.optimizer
    if job.software.optimizer is not None:
        return stepped * job.software.optimizer / stream
    return (
        2
        * (stepped * (job.precision.weight + job.gradient + job.software.gradient_copy) + state)
        / stream
    )
