"""Seconds of a step outside the passes: gradients of the replicas, and the optimizer."""

from __future__ import annotations

from lightning_ptdp.planner.communication import group_link, pipeline_link
from lightning_ptdp.planner.expert_cost import expert_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.memory import static_bytes
from lightning_ptdp.planner.parameters import gathers_layers, num_gathers


def gradients_time(
    job: Job, choice: Choice, parameters: int, experts: int, *, hidden_behind: float
) -> float:
    """Return the exposed seconds to sum the gradients over the replicas.

    The sum is an all-reduce. With a sharded optimizer, it is a reduce-scatter and an all-gather of
    the parameters. Sharded gradients are scattered after every microbatch. Gradients of ``experts``
    are summed over the ranks with the same experts. They are also summed over the tensor-parallel
    ranks if each of these had a part of the tokens.
    """
    groups = (
        group_link(choice.layout, job.cluster, "replica_sum"),
        expert_link(job, choice, "expert_replicas"),
    )
    summed = [
        (group, job.trained * count)
        for group, count in zip(groups, (parameters - experts, experts), strict=True)
    ]
    weight = job.precision.weight
    gradient = job.gradient
    tied = 0.0
    layout = choice.layout
    if job.shape.tied and layout.last_stage_rank != layout.rank_of_stage(0):
        rows, columns = job.shape.head.table
        # Two ranks exchange the whole table, in both directions at once.
        tied = pipeline_link(layout, job.cluster).send(
            job.trained * rows / layout.tensor_parallel_size * columns * gradient
        )
    if experts and layout.expert_tensor_parallel_size == 1 and not job.software.folds_experts:
        tied += group_link(layout, job.cluster, "tensor").all_reduce(
            job.trained * experts * gradient
        )
    # those of layers are part of their passes; nothing hides those of tables
    if gathers_layers(job, choice):
        table = job.shape.input.table_elements(layout.tensor_parallel_size)
        return tied + groups[0].all_gather(table * weight) + groups[0].all_gather(table * gradient)
    if choice.shard != "none":
        scattered = sum(group.all_gather(count * gradient) for group, count in summed)
        gathered = sum(group.all_gather(count * weight) for group, count in summed)
        earlier = choice.num_microbatches - 1 if choice.shard != "optimizer" else 0
        if choice.shard == "parameters":
            # A computation of one chunk hides the gather of the next; nothing hides the first one.
            chunk = gathered / layout.virtual_pipeline_size
            later = max(0.0, chunk - hidden_behind / layout.virtual_pipeline_size / 2)
            exposed = chunk + (num_gathers(choice) - 1) * later
        else:
            exposed = _exposed(gathered, choice, hidden_behind / 2)
        return (
            tied
            + earlier * max(0.0, scattered - hidden_behind)
            + _exposed(scattered, choice, hidden_behind)
            + exposed
        )
    return tied + _exposed(
        sum(group.all_reduce(count * gradient) for group, count in summed), choice, hidden_behind
    )


def _exposed(seconds: float, choice: Choice, pass_s: float) -> float:
    """Return the seconds of a reduction that a pass of ``pass_s`` seconds does not hide.

    The reduction starts in the last microbatch's pass, half of which hides it. With several chunks,
    each chunk runs its last p microbatches before those of another chunk, which hide its reduction.
    Only its own pass hides the reduction of the last chunk.
    """
    p = choice.layout.pipeline_parallel_size
    v = choice.layout.virtual_pipeline_size
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
