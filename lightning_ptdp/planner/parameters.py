"""Stages of the pipeline with their layers and parameters."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from lightning_ptdp.planner.job import Job
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
        experts = sum(count * layer.expert_parameters(layout) for count, layer in runs)
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
    return tuple(_counted(layers[start:stop]) for start, stop in ranges)


def _counted(layers: list[LayerShape]) -> tuple[tuple[int, LayerShape], ...]:
    """Return (number of layers, layer) for each kind of layer."""
    kinds = {id(layer): layer for layer in layers}
    return tuple((count, kinds[key]) for key, count in Counter(map(id, layers)).items())
