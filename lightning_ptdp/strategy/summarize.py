"""The facts of a run for ``summary.py`` to show."""

from __future__ import annotations

import torch.distributed as dist

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.schedule import Costs, Schedule, simulate
from lightning_ptdp.schedule.generators import schedule_name
from lightning_ptdp.summary import StageSummary, StrategySummary
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["summarize"]


def summarize(*, parallel: ParallelModel, mesh: ProcessMesh, config: PTDPConfig) -> StrategySummary:
    """Degrees, stages, parameters a rank and the schedule's ideal bubble; collective over the world."""
    layout = mesh.layout
    microbatches = config.usual_microbatches
    schedule = None if microbatches is None else config.build_schedule(microbatches)
    local = sum(parameter.numel() for parameter in parallel.records)
    counts: list[int] = [local]
    if layout.world_size > 1:
        counts = [0] * layout.world_size
        dist.all_gather_object(counts, local)
    return StrategySummary(
        layout=layout,
        schedule=schedule_name(config.schedule, config.virtual_pipeline_size),
        num_microbatches=microbatches,
        micro_batch_size=config.micro_batch_size,
        stages=_stages(parallel, layout),
        parameters_per_rank=tuple(counts),
        bubble=None if schedule is None else _bubble(schedule),
        notes=parallel.notes,
    )


def _bubble(schedule: Schedule) -> float:
    return simulate(schedule, Costs(backward=1 if schedule.splits_backward else 2)).idle_fraction


def _stages(parallel: ParallelModel, layout: ParallelLayout) -> tuple[StageSummary, ...]:
    if parallel.parts is None or parallel.cut is None:
        return ()
    last = len(parallel.ranges) - 1
    parts = parallel.parts
    held = [(0, parts.before), *((stage, parts.between) for stage in parallel.cut.starts), (last, parts.after)]
    extras = {stage: ", ".join(name for at, names in held if at == stage for name in names) for stage, _ in held}
    return tuple(
        StageSummary(
            stage=stage,
            rank=layout.rank_of_stage(stage),
            first_layer=start,
            last_layer_exclusive=stop,
            extra=extras.get(stage, ""),
        )
        for stage, (start, stop) in enumerate(parallel.ranges)
    )
