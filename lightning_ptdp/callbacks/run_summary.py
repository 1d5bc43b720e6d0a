"""Summary of a run before it starts: degrees, stages, parameters per rank, bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_ptdp.base.output import columns
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.schedule import ideal_bubble
from lightning_ptdp.schedule.generators import schedule_name
from lightning_ptdp.shims.lightning import StrategyBase
from lightning_ptdp.tensor_parallel import Experts
from lightning_ptdp.world.layout import ParallelLayout

_CHOSEN = ("top_k", "experts_per_token", "num_experts_per_tok", "num_experts_per_token")


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """One pipeline stage.

    Attributes:
        stage: Index of the stage; the batch enters at stage 0.
        rank: Pipeline rank that holds it.
        first_layer: Index of its first layer.
        last_layer_exclusive: One past the index of its last layer.
        extra: Modules that it holds besides layers, such as ``"embedding"`` or ``"norm, head"``.
    """

    stage: int
    rank: int
    first_layer: int
    last_layer_exclusive: int
    extra: str = ""

    @property
    def layers(self) -> str:
        """Return the layers as ``"0-2"``, ``"3"`` or ``"none"``."""
        last = self.last_layer_exclusive - 1
        if last < self.first_layer:
            return "none"
        return str(last) if last == self.first_layer else f"{self.first_layer}-{last}"


@dataclass(frozen=True, kw_only=True)
class StrategySummary:
    """Layout of one run.

    Attributes:
        layout: Degrees of parallelism.
        schedule: Name of the pipeline schedule.
        num_microbatches: m, microbatches in a step of one replica; None if it depends on each
            batch.
        micro_batch_size: b, samples of a microbatch, if it determines m.
        stages: All pipeline stages in order; empty without a pipeline.
        parameters_per_rank: Parameters (elements) that each global rank holds.
        parameters: Parameters of the whole model, tied ones counted once.
        active_parameters: Parameters that one token visits, for a mixture whose number of experts
            per token is known; else None.
        bubble: Bubble of the schedule over the time of its computations, with equal stages; None if
            m is not known.
        notes: Notes for the user, such as a padded vocabulary.
    """

    layout: ParallelLayout
    schedule: str
    num_microbatches: int | None
    micro_batch_size: int | None = None
    stages: tuple[StageSummary, ...] = ()
    parameters_per_rank: tuple[int, ...] = ()
    parameters: int | None = None
    active_parameters: int | None = None
    bubble: float | None = 0.0
    notes: tuple[str, ...] = ()


def summarize(strategy: StrategyBase) -> StrategySummary:
    """Return the summary of a run: degrees, stages, parameters per rank and the ideal bubble.

    Collective over the world."""
    config: PTDPConfig = strategy.config
    parallel: ParallelModel = strategy.parallel
    layout: ParallelLayout = strategy.layout
    microbatches = config.usual_microbatches
    schedule = None if microbatches is None else config.build_schedule(microbatches)
    local = _held(parallel)
    all_held = strategy.mesh.world.gather(local)
    once = [all_held[rank] for rank in layout.group_of("shards", 0)]
    total = sum(held.counted for held in once)
    resting = [held.resting for held in once]
    return StrategySummary(
        layout=layout,
        schedule=schedule_name(config.schedule, config.virtual_pipeline_size),
        num_microbatches=microbatches,
        micro_batch_size=config.micro_batch_size,
        stages=_stages(parallel, layout),
        parameters_per_rank=tuple(held.local for held in all_held),
        parameters=total,
        active_parameters=round(total - sum(resting))
        if any(resting) and not math.isnan(sum(resting))
        else None,
        bubble=None if schedule is None else ideal_bubble(schedule),
        notes=parallel.notes,
    )


class _Held(NamedTuple):
    """Numbers of parameters of a rank.

    Attributes:
        local: Parameters that the rank holds.
        counted: Parameters that the rank counts for all ranks that hold them.
        resting: Counted parameters of experts that a token does not visit. NaN if the number of
            experts per token is not known.
    """

    local: int
    counted: int
    resting: float


def _held(parallel: ParallelModel) -> _Held:
    counted = {
        p: managed.placement.num_unrepeated
        for p, managed in parallel.parameters.items()
        if managed.placement.counted
    }
    kind = Experts()
    resting = 0.0
    for name, module in parallel.module.named_modules():
        if kind.fits(module):
            of_experts = list(module.parameters())
            number = parallel.parameters[of_experts[0]].placement.full_shape[0]
            chosen = _chosen(parallel.module, name)
            resting += sum(counted.get(p, 0) for p in of_experts) * (
                1 - (chosen or math.nan) / number
            )
    return _Held(sum(p.numel() for p in parallel.parameters), sum(counted.values()), resting)


def _chosen(module: nn.Module, experts: str) -> int | None:
    """Return the number of experts that a token visits; None if it is not known.

    It is an attribute of the modules around the experts, or of their configurations."""
    parent = module.get_submodule(experts.rpartition(".")[0])
    modules = [module.get_submodule(experts), parent, *parent.children()]
    values = (
        getattr(source, key, None)
        for submodule in modules
        for source in (submodule, getattr(submodule, "config", None))
        for key in _CHOSEN
    )
    return next((number for number in values if isinstance(number, int)), None)


def _stages(parallel: ParallelModel, layout: ParallelLayout) -> tuple[StageSummary, ...]:
    if parallel.cut is None:
        return ()
    last = len(parallel.ranges) - 1
    parts = parallel.cut.parts
    modules = [
        (0, parts.before),
        *((stage, parts.between) for stage in parallel.cut.starts),
        (last, parts.after),
    ]
    return tuple(
        StageSummary(
            stage=stage,
            rank=layout.rank_of_stage(stage),
            first_layer=start,
            last_layer_exclusive=stop,
            extra=", ".join(name for owner, names in modules if owner == stage for name in names),
        )
        for stage, (start, stop) in enumerate(parallel.ranges)
    )


def render(summary: StrategySummary) -> str:
    """Return the summary as a text table.

    The table is at most 100 columns wide for ordinary sizes::

        layout      4 processes: tensor 2 x pipeline 2 x data 1, 2 chunks a pipeline rank
        schedule    interleaved, 8 microbatches, bubble 6.2 %
        parameters  912.5 K to 1.2 M a rank

        stage  ranks  layers  also
            0  0-1    0       embedding
            1  2-3    1
    """
    facts = [
        ["layout", _degrees(summary.layout)],
        ["schedule", _schedule(summary)],
        *_parameters(summary),
    ]
    parts = [columns(facts, words=(0, 1))]
    if summary.stages:
        header = ["stage", "ranks", "layers", "also"]
        rows = [
            [str(s.stage), _ranks_of(summary.layout, s.rank), s.layers, s.extra]
            for s in summary.stages
        ]
        parts.append(columns([header, *rows], words=(1, 2, 3)))
    if summary.notes:
        parts.append("\n".join(f"note: {note}" for note in summary.notes))
    return "\n\n".join(parts)


def _degrees(layout: ParallelLayout) -> str:
    axes = " x ".join(f"{axis.name} {layout.size(axis.name)}" for axis in layout.named_axes())
    text = f"{_count(layout.world_size, 'process', 'processes')}: {axes}"
    if layout.virtual_pipeline_size > 1:
        text += f", {layout.virtual_pipeline_size} chunks per pipeline rank"
    return text + (", sequence parallel" if layout.sequence_parallel else "")


def _schedule(summary: StrategySummary) -> str:
    if summary.num_microbatches is None:
        assert summary.micro_batch_size is not None
        return (
            f"{summary.schedule}, microbatches of "
            f"{_count(summary.micro_batch_size, 'sample', 'samples')}"
        )
    text = f"{summary.schedule}, {_count(summary.num_microbatches, 'microbatch', 'microbatches')}"
    if summary.stages and summary.bubble is not None:
        text += f", bubble {100 * summary.bubble:.1f} %"
    return text


def _parameters(summary: StrategySummary) -> list[list[str]]:
    if not summary.parameters_per_rank:
        return []
    least = _short(min(summary.parameters_per_rank))
    most = _short(max(summary.parameters_per_rank))
    text = f"{least if least == most else f'{least} to {most}'} per rank"
    if summary.parameters is not None and summary.active_parameters is not None:
        text += (
            f"; {_short(summary.parameters)} in total, {_short(summary.active_parameters)} "
            "active per token"
        )
    return [["parameters", text]]


def _ranks_of(layout: ParallelLayout, pipeline_rank: int) -> str:
    """Return the global ranks of all replicas that hold a stage of this pipeline rank.

    Pipeline is the outermost axis."""
    width = layout.world_size // layout.size("pipeline")
    first = pipeline_rank * width
    return str(first) if width == 1 else f"{first}-{first + width - 1}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _short(number: int) -> str:
    """Return a short form of a number: ``1234567`` -> ``"1.2 M"``."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
