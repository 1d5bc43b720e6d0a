"""The choices of a search: degrees that fit the sizes, and reasons for rejections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_ptdp.attention import ATTENTIONS, AttentionKind
from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.parameters import layers_by_stage
from lightning_ptdp.schedule.generators import FAMILIES, schedule_placement
from lightning_ptdp.world.axes import divisors
from lightning_ptdp.world.layout import ParallelLayout, Sharding

_CONTEXT_FROM = 8192
_MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class Space:
    """Choices to try; None means every sensible choice for the job.

    Attributes:
        tensor_parallel_sizes: Default: the divisors of a node's size, because tensor parallelism
            over several nodes waits for their links (arXiv 2104.04473, section 3.2).
        pipeline_parallel_sizes: Default: all that fit.
        virtual_pipeline_sizes: Default: 1, and sizes up to 8 that give every stage the same number
            of layers.
        context_parallel_sizes: Default: 1; from 8192 tokens on also 2, 4 and 8.
        context_parallel_attentions: Exchanges of context parallelism.
        expert_parallel_sizes: Default: 1; for a mixture all that divide its experts and d c.
        expert_tensor_parallel_sizes: Default: 1; for a mixture also t.
        data_parallel_sizes: Default: the number of devices that remain.
        micro_batch_sizes: Default: powers of two up to 32.
        schedules: Names of the package's schedules.
        recompute: Tried in this order until one fits. Later ones should hold less and take longer.
            "selective" is not a default, because with fused attention it frees only the
            log-sum-exps.
        sequence_parallel: Default: wherever t > 1 divides the sequence, because it holds less and
            sends as much.
        shard: Tried in this order until one fits.

    Raises:
        ValueError: A schedule or recomputation is unknown, or a size is not a positive integer.
    """

    tensor_parallel_sizes: Sequence[Size] | None = None
    pipeline_parallel_sizes: Sequence[Size] | None = None
    virtual_pipeline_sizes: Sequence[Size] | None = None
    context_parallel_sizes: Sequence[Size] | None = None
    context_parallel_attentions: Sequence[AttentionKind] = get_args(AttentionKind)
    expert_parallel_sizes: Sequence[Size] | None = None
    expert_tensor_parallel_sizes: Sequence[Size] | None = None
    data_parallel_sizes: Sequence[Size] | None = None
    micro_batch_sizes: Sequence[Size] | None = None
    schedules: Sequence[str] = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
    recompute: Sequence[Literal["none", "selective", "full"]] = ("none", "full")
    sequence_parallel: bool | None = None
    shard: Sequence[Sharding] = get_args(Sharding)

    def __post_init__(self) -> None:
        check_types(self)
        for value in self.schedules:
            if value not in FAMILIES:
                raise ValueError(
                    f"schedules has {value!r}, which the planner does not support. It supports "
                    f"{', '.join(FAMILIES)}"
                )


@dataclass(frozen=True)
class UnfitSize:
    """Sizes that cannot be used.

    Attributes:
        what: The sizes, such as ``t3``.
        reason: Reason that they cannot be used.
    """

    what: str
    reason: str


def layouts(job: Job, space: Space) -> Iterator[ParallelLayout | UnfitSize]:
    """Yield all (t, c, p, e) of the space, or a ``UnfitSize`` for those that cannot be used.

    The layouts have one chunk per rank.
    """
    within_nodes = divisors(math.gcd(job.cluster.node_size, job.world_size))
    contexts = (1,) if job.sequence_length < _CONTEXT_FROM else (1, 2, 4, 8)
    for t in space.tensor_parallel_sizes or within_nodes:
        reason = _tensor_misfit(job, t)
        if reason:
            yield UnfitSize(f"t{t}", reason)
            continue
        for c in space.context_parallel_sizes or contexts:
            if job.world_size % (t * c) or (c > 1 and job.sequence_length % (2 * c)):
                reason = (
                    f"{t} * {c} does not divide the world of {job.world_size}, or 2c the sequence"
                )
                yield UnfitSize(f"t{t} c{c}", reason)
                continue
            ranks = job.world_size // (t * c)
            for p in space.pipeline_parallel_sizes or divisors(ranks):
                reason = _pipeline_misfit(job, space, ranks, p)
                if reason:
                    yield UnfitSize(f"t{t} c{c} p{p}", reason)
                    continue
                layout = ParallelLayout(
                    world_size=job.world_size,
                    tensor_parallel_size=t,
                    context_parallel_size=c,
                    pipeline_parallel_size=p,
                )
                yield from _expert_sizes(job, space, layout)


def pipelines(job: Job, space: Space, layout: ParallelLayout) -> Iterator[Choice | UnfitSize]:
    """Yield all schedules, chunks and microbatches for a layout, or a ``UnfitSize``.

    The layout defines (t, c, p, e).
    """
    t = layout.tensor_parallel_size
    p = layout.pipeline_parallel_size
    of_replica = job.global_batch_size // layout.data_parallel_size
    split = (
        t > 1
        and job.shape.splits_sequence
        and job.sequence_length % (t * layout.context_parallel_size) == 0
    )
    if space.sequence_parallel is not None:
        if space.sequence_parallel and t > 1 and not split:
            yield UnfitSize(
                f"t{t}",
                f"sequence parallelism: {t} does not divide {job.sequence_length} tokens",
            )
            return
        split = space.sequence_parallel and t > 1
    for schedule, v in _schedules(job, space, p):
        placement = schedule_placement(schedule) if p > 1 else "loop"
        full_layout = replace(
            layout, virtual_pipeline_size=v, sequence_parallel=split, placement=placement
        )
        for b in space.micro_batch_sizes or [2**power for power in range(6)]:
            m, rest = divmod(of_replica, b)
            if rest:
                continue
            if p > 1 and m < (least := FAMILIES[schedule].least(p)):
                yield UnfitSize(
                    f"p{p} {schedule} m{m}",
                    f"too few microbatches to be faster than 1F1B, which takes {least}",
                )
                continue
            for exchange in _exchanges(job, space, full_layout):
                yield Choice(
                    layout=full_layout,
                    schedule=schedule,
                    context_parallel_attention=exchange,
                    micro_batch_size=b,
                    num_microbatches=m,
                )


def _tensor_misfit(job: Job, t: int) -> str:
    for divided in job.shape.divided:
        if not divided.by(t):
            return f"{divided.name}={divided.size} is not divisible by it"
    return f"it does not divide the world of {job.world_size}" if job.world_size % t else ""


def _pipeline_misfit(job: Job, space: Space, ranks: int, p: int) -> str:
    """Return the reason that p of ``ranks`` pipeline and data ranks cannot be used, or ""."""
    if ranks % p:
        return f"it does not divide the world of {job.world_size}"
    if p > 1 and job.shape.uncut:
        return f"the model cannot be cut into pipeline stages: {job.shape.uncut}"
    if p > job.shape.num_layers:
        return f"{job.shape.num_layers} layers cannot fill {p} stages"
    d = ranks // p
    if space.data_parallel_sizes is not None and d not in space.data_parallel_sizes:
        return f"d = {d} is not one of the data_parallel_sizes"
    if job.global_batch_size % d:
        return f"the global batch of {job.global_batch_size} is not divisible by d = {d} replicas"
    return ""


def _exchanges(job: Job, space: Space, layout: ParallelLayout) -> Iterator[AttentionKind]:
    """Yield the possible exchanges; some need heads for all of their ranks."""
    c = layout.context_parallel_size
    if c == 1:
        yield "ring"
        return
    divisible = all(
        attention.heads % (layout.tensor_parallel_size * c) == 0
        for _, layer in job.shape.runs
        for attention in layer.attentions
    )
    for kind in space.context_parallel_attentions:
        if divisible or not ATTENTIONS[kind].divides_heads:
            yield kind


def _expert_splits(
    job: Job, space: Space, layout: ParallelLayout
) -> Iterator[ParallelLayout | UnfitSize]:
    """Yield layouts with unsplit experts, and layouts with experts split over t ranks."""
    t = layout.tensor_parallel_size
    experts = job.shape.experts
    sizes = space.expert_tensor_parallel_sizes
    for size in sizes or dict.fromkeys((1, t)):
        if size == 1 or (size == t and experts is not None and experts.width % t == 0):
            yield replace(layout, expert_tensor_parallel_size=size)
        elif sizes is not None:
            reason = (
                "the model has no experts"
                if experts is None
                else f"experts of {experts.width} channels are not split, or split over all t = {t}"
            )
            yield UnfitSize(
                f"{layout.describe()} expert_tensor_parallel_size={size}", reason=reason
            )


def _expert_sizes(
    job: Job, space: Space, layout: ParallelLayout
) -> Iterator[ParallelLayout | UnfitSize]:
    ranks = layout.size("replica_sum")
    experts = job.shape.experts
    number = 1 if experts is None else experts.number
    valid_sizes = divisors(math.gcd(ranks, number))
    for e in space.expert_parallel_sizes or valid_sizes:
        if e in valid_sizes:
            yield from _expert_splits(job, space, replace(layout, expert_parallel_size=e))
        elif experts is None:
            yield UnfitSize(f"e{e}", "the model has no experts")
        elif number % e:
            yield UnfitSize(f"e{e}", f"num_experts={number} is not divisible by it")
        else:
            yield UnfitSize(
                f"{layout.describe()} e{e}",
                f"it does not divide d c = {ranks}, the ranks over which experts are distributed",
            )


def _schedules(job: Job, space: Space, p: int) -> Iterator[tuple[str, int]]:
    if p == 1:
        yield "1f1b", 1
        return
    for schedule in space.schedules:
        chunks: Sequence[int] = (1,)
        if schedule_placement(schedule) == "v":
            chunks = (2,)
        elif FAMILIES[schedule].chunks == "several":
            chunks = _chunks(job, space, p)
        for v in chunks:
            allowed = space.virtual_pipeline_sizes is None or v in space.virtual_pipeline_sizes
            if allowed and p * v <= job.shape.num_layers:
                yield schedule, v


def _chunks(job: Job, space: Space, p: int) -> Sequence[int]:
    if space.virtual_pipeline_sizes is not None:
        return [v for v in space.virtual_pipeline_sizes if v > 1]
    most = min(_MOST_CHUNKS, job.shape.num_layers // p)
    return [v for v in range(2, most + 1) if v == 2 or len(set(layers_by_stage(job, p * v))) == 1]
