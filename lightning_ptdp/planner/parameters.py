"""Stages with their layers and parameters, and the cost of sharing the parameters."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import LayerShape, ModelShape
from lightning_ptdp.schedule.partition import partition_layers
from lightning_ptdp.world.layout import ParallelLayout


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline on one tensor-parallel rank.

    Attributes:
        runs: Its layers as (number, layer) pairs.
        parameters: Number of its parameters. The vocabulary is padded, and a tied head is a second
            copy if its rank differs from the embedding's.
        experts: Number of the experts' parameters among them. A rank has 1/e of these, and only
            ranks with the same experts share them.
    """

    runs: tuple[tuple[int, LayerShape], ...]
    parameters: int
    experts: int


def job_stages(job: Job, layout: ParallelLayout) -> tuple[Stage, ...]:
    """Return all stages of a layout in their order."""
    return _stages(job.shape, layout, balanced=job.software.balances_stages)


def rank_stages(job: Job, layout: ParallelLayout, pipeline_rank: int) -> list[Stage]:
    """Return the stages of one pipeline rank."""
    stages = job_stages(job, layout)
    return [stages[index] for index in layout.stages_of(pipeline_rank)]


def layers_by_stage(job: Job, num_stages: int) -> list[int]:
    """Return the number of layers of each stage."""
    stages = _stage_runs(job.shape, num_stages, balanced=job.software.balances_stages)
    return [sum(count for count, _ in runs) for runs in stages]


@functools.lru_cache(maxsize=64)
def _stages(model: ModelShape, layout: ParallelLayout, *, balanced: bool) -> tuple[Stage, ...]:
    t = layout.tensor_parallel_size
    ends = [0] * layout.num_stages
    ends[0] += model.input.table_elements(t) + model.input.parameters.on(t)
    shared = model.tied and layout.last_stage_rank == layout.rank_of_stage(0)
    ends[-1] += model.head.parameters.on(t) + (0 if shared else model.head.table_elements(t))
    stages = []
    for runs, end in zip(
        _stage_runs(model, layout.num_stages, balanced=balanced), ends, strict=True
    ):
        experts = sum(
            count * layer.experts.local(layout)
            for count, layer in runs
            if layer.experts is not None
        )
        dense = sum(count * layer.parameters.on(t) for count, layer in runs)
        stages.append(Stage(runs, dense + experts + end, experts))
    return tuple(stages)


@functools.lru_cache(maxsize=256)
def _stage_runs(
    model: ModelShape, num_stages: int, *, balanced: bool
) -> tuple[tuple[tuple[int, LayerShape], ...], ...]:
    """Return the runs of each stage.

    Balanced stages are those of the strategy's default: by multiply-adds, where a look-up counts an
    eighth. Otherwise all layers count the same, and the ends count nothing.
    """
    layers = model.layers
    ranges = (
        partition_layers(
            [layer.cost or 1.0 for layer in layers],
            num_stages=num_stages,
            first_cost=model.input.cost,
            last_cost=model.head.cost,
        )
        if balanced
        else partition_layers([1.0] * len(layers), num_stages=num_stages)
    )
    return tuple(
        tuple((count, layers[start + index]) for index, count in _firsts(layers[start:stop]))
        for start, stop in ranges
    )


def _firsts(layers: list[LayerShape]) -> list[tuple[int, int]]:
    """Return (index of the first layer, number of layers) for each kind of layer."""
    indices = {id(layer): index for index, layer in reversed(list(enumerate(layers)))}
    counts = Counter(id(layer) for layer in layers)
    return [(indices[layer_id], count) for layer_id, count in counts.items()]


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
    """Return the bytes of a rank that stay whole between layers.

    These are the parameters of two chunks of a pipeline, and the gradients of one of several chunks;
    or the tables, which stay whole for the step.
    """
    if choice.shard != "parameters":
        return 0.0
    if not gathers_layers(job, choice):
        chunks = len(stages)
        gradients = job.gradient if chunks > 1 else 0
        return parameters / chunks * (min(2, chunks) * job.precision.weight + gradients)
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
