"""Number of parameters on a rank, by stage, and the cost of sharing them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import LayerShape, ModelShape
from lightning_ptdp.schedule.partition import partition_layers
from lightning_ptdp.world.layout import ParallelLayout


@functools.lru_cache(maxsize=64)
def stage_parameters(
    model: ModelShape, layout: ParallelLayout, *, balanced: bool = True
) -> tuple[int, ...]:
    """Return the parameters of each stage on one tensor-parallel rank, in the order of stages.

    The vocabulary is padded. A tied head is a second copy if its rank differs from the embedding's.

    Args:
        model: Shape of the model.
        layout: Degrees of parallelism.
        balanced: See ``stage_layers``.
    """
    t = layout.tensor_parallel_size
    stages = [
        sum(count * layer.parameters.on(t) for count, layer in runs) + experts
        for runs, experts in zip(
            stage_layers(model, layout.num_stages, balanced=balanced),
            expert_parameters(model, layout, balanced=balanced),
            strict=True,
        )
    ]
    stages[0] += model.input.table_elements(t) + model.input.parameters.on(t)
    shared = model.tied and layout.last_stage_rank == layout.rank_of_stage(0)
    stages[-1] += model.head.parameters.on(t) + (0 if shared else model.head.table_elements(t))
    return tuple(stages)


@functools.lru_cache(maxsize=64)
def expert_parameters(
    model: ModelShape, layout: ParallelLayout, *, balanced: bool = True
) -> tuple[int, ...]:
    """Return the experts' part of ``stage_parameters``.

    A rank has 1/e of these parameters. Only ranks with the same experts share them.
    """

    def held(layer: LayerShape) -> int:
        return 0 if layer.experts is None else layer.experts.local(layout)

    stages = stage_layers(model, layout.num_stages, balanced=balanced)
    return tuple(sum(count * held(layer) for count, layer in runs) for runs in stages)


@functools.lru_cache(maxsize=64)
def stage_layers(
    model: ModelShape, num_stages: int, *, balanced: bool = True
) -> tuple[tuple[tuple[int, LayerShape], ...], ...]:
    """Return the layers of each stage as (number, layer) pairs.

    The partition is the strategy's default: by multiply-adds, where a look-up counts an eighth.

    Args:
        model: Shape of the model.
        num_stages: Number of stages.
        balanced: If False, all layers count the same, and the ends count nothing.
    """
    layers = model.layers
    costs = (1.0,) * len(layers)
    first = 0.0
    last = 0.0
    if balanced:
        costs = tuple(layer.cost or 1.0 for layer in layers)
        first = model.input.cost
        last = model.head.cost
    return tuple(
        tuple((count, layers[start + index]) for index, count in _firsts(layers[start:stop]))
        for start, stop in _split(costs, num_stages, first, last)
    )


def layers_by_stage(
    model: ModelShape, num_stages: int, *, balanced: bool = True
) -> tuple[int, ...]:
    """Return the number of layers of each stage; see ``stage_layers`` for ``balanced``."""
    return tuple(
        sum(count for count, _ in runs)
        for runs in stage_layers(model, num_stages, balanced=balanced)
    )


def _firsts(layers: list[LayerShape]) -> list[tuple[int, int]]:
    """Return (index of the first layer, number of layers) for each kind of layer."""
    indices = {id(layer): index for index, layer in reversed(list(enumerate(layers)))}
    counts = Counter(id(layer) for layer in layers)
    return [(indices[layer_id], count) for layer_id, count in counts.items()]


@functools.lru_cache(maxsize=256)
def _split(
    costs: tuple[float, ...], num_stages: int, first: float, last: float
) -> tuple[tuple[int, int], ...]:
    return partition_layers(costs, num_stages=num_stages, first_cost=first, last_cost=last)


# ---- Cost of parameters that replicas share (FSDP, ZeRO-3) ---------------------------------------
#
# The cost consists of gathering, scattering and the copies around them. A layer's parameters are
# gathered before its forward and before its backward, at the same time as the previous layer runs,
# and copied to where the layer reads them. Its gradients are reduced and scattered once per
# microbatch (torch's FSDP2: foreach_all_gather, foreach_reduce).


def gathered_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of a layer's gathered parameters on one tensor-parallel rank."""
    experts = 0 if layer.experts is None else layer.experts.local(choice.layout)
    count = layer.parameters.on(choice.layout.tensor_parallel_size) + experts
    if choice.shard == "parameters":
        return count * job.precision.weight
    return count * (1 if job.software.float8 else job.precision.compute)


def shards_parameters(job: Job, choice: Choice) -> bool:
    """Return True if replicas share the parameters."""
    return choice.shard == "parameters" or job.software.shards != "none"


def gathers_layers(job: Job, choice: Choice) -> bool:
    """Return True if parameters are gathered layer by layer, not by the chunks of a pipeline."""
    p = choice.layout.pipeline_parallel_size
    return job.software.shards != "none" or (choice.shard == "parameters" and p == 1)


def whole_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of the layers that are whole at a time.

    They are the parameters of the current layer and of the next, and gradients to scatter.
    """
    return 3 * gathered_bytes(job, choice, layer) if gathers_layers(job, choice) else 0.0


def num_gathers(choice: Choice) -> int:
    """Return how often the chunks of a rank are gathered in a step.

    Two are whole at a time. Of more, each passes groups of p microbatches forward and backward.
    """
    p = choice.layout.pipeline_parallel_size
    v = choice.layout.virtual_pipeline_size
    return v if v <= 2 else 2 * v * -(-choice.num_microbatches // p)


def kept_whole_bytes(job: Job, choice: Choice, stages: Sequence[int], parameters: float) -> float:
    """Return the bytes of a rank's parameters that stay whole between layers.

    These are two chunks of a pipeline, or the tables, which stay whole for the step.
    """
    if choice.shard != "parameters":
        return 0.0
    if not gathers_layers(job, choice):
        return parameters * min(2, len(stages)) / len(stages) * job.precision.weight
    t = choice.layout.tensor_parallel_size
    last = choice.layout.num_stages - 1
    tables = job.shape.input.table_elements(t) if 0 in stages else 0
    if last in stages and not (job.shape.tied and 0 in stages):
        tables += job.shape.head.table_elements(t)
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
