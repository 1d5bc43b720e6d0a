"""Search for a job's best layouts, with the reasons that the other layouts are worse."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.memory import RankMemory, fullest_rank
from lightning_ptdp.planner.parameters import job_stages
from lightning_ptdp.planner.replica_cost import static_bytes
from lightning_ptdp.planner.search_space import Space, UnfitSize, layouts, pipelines
from lightning_ptdp.planner.step_time import StepTime, simulated_step_time, step_time
from lightning_ptdp.schedule.generators import FAMILIES
from lightning_ptdp.world.axes import AXES

_SIMULATED = 800
"""Largest p v m of a simulated schedule, which takes some 20 ms."""
_DIGITS = 9
"""Digits in which equal times agree, because their parts may be summed in another order."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A choice that fits, with its memory and time."""

    choice: Choice
    memory: RankMemory
    time: StepTime
    simulated: bool = False
    """True if the time is from the simulator, False if from closed forms."""

    @property
    def degrees(self) -> str:
        """Return the degrees of the axes alone, as in "t2 p2 d1"."""
        layout = replace(self.choice.layout, virtual_pipeline_size=1, sequence_parallel=False)
        return layout.describe()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of a search.

    Attributes:
        job: The planned job.
        best: Fastest candidates, best first.
        rejected: Unusable choices with reasons. If no microbatch size and schedule of a layout fits
            in memory, only the one that needs least is listed.
        slower: Degrees that fit and are not among the best, with the additional time of their
            fastest candidate and the part that takes it.
        examined: Number of estimated choices.
    """

    job: Job
    best: tuple[Candidate, ...]
    rejected: tuple[UnfitSize, ...]
    slower: tuple[UnfitSize, ...]
    examined: int


def search(job: Job, space: Space | None = None, *, count: int = 10, simulate: bool = True) -> Plan:
    """Return the fastest layouts that fit in memory.

    All choices of the space are estimated by closed forms. If the parameters of a layout alone do
    not fit, its microbatches and schedules are skipped. The first recomputation and optimizer
    sharding that fits is used. The simulator then times the best candidates whose schedules are
    small enough, and the candidates are sorted again.

    Args:
        job: Model, devices, batch.
        space: Choices to try.
        count: Number of candidates to return.
        simulate: Time the best candidates by the simulator.

    Raises:
        ValueError: ``count`` is not positive.
    """
    if count < 1:
        raise ValueError(f"count={count!r} must be a positive integer")
    space = space or Space()
    candidates: list[Candidate] = []
    rejected: list[UnfitSize] = []
    examined = 0
    for layout in layouts(job, space):
        if isinstance(layout, UnfitSize):
            rejected.append(layout)
            continue
        pipes = list(pipelines(job, space, layout))
        choices = [item for item in pipes if isinstance(item, Choice)]
        if choices and (need := _least_bytes(job, space, choices[0])) > job.limit_bytes:
            text = "parameters, gradients and optimizer state alone need"
            rejected.append(
                UnfitSize(
                    what=layout.describe(), reason=f"{text} {_gib(need)} of {_gib(job.limit_bytes)}"
                )
            )
            continue
        tried = [_first_that_fits(job, space, item) for item in choices]
        fitting = [(choice, memory) for choice, memory in tried if memory.total <= job.limit_bytes]
        candidates += [
            Candidate(choice=choice, memory=memory, time=step_time(job, choice))
            for choice, memory in fitting
        ]
        examined += len(tried)
        rejected += dict.fromkeys(item for item in pipes if isinstance(item, UnfitSize))
        if tried and not fitting:
            nearest, memory = min(tried, key=lambda item: item[1].total)
            reason = (
                f"needs at least {_gib(memory.total)} of {_gib(job.limit_bytes)} "
                f"({nearest.describe()})"
            )
            rejected.append(UnfitSize(what=layout.describe(), reason=reason))
    best = heapq.nsmallest(count, candidates, key=_order)
    slower = tuple(_slower(best, candidates))
    if simulate:
        best = sorted((_simulated(job, candidate) for candidate in best), key=_order)
    return Plan(
        job=job, best=tuple(best), rejected=tuple(rejected), slower=slower, examined=examined
    )


def _least_bytes(job: Job, space: Space, choice: Choice) -> float:
    """Return the bytes of weights, gradients and optimizer state alone.

    The recomputation and sharding are those that hold least.
    """
    *_, smallest = _choices(job, space, choice)
    stages = job_stages(job, choice.layout)
    p = choice.p
    # The fullest rank has no less than the mean.
    parameters = sum(stage.parameters for stage in stages) / p
    return sum(static_bytes(job, smallest, parameters, sum(stage.experts for stage in stages) / p))


def _first_that_fits(job: Job, space: Space, choice: Choice) -> tuple[Choice, RankMemory]:
    """Return the first recomputation and sharding that fits in memory.

    If none fits, return the one that needs least.
    """
    tried: list[tuple[Choice, RankMemory]] = []
    for variant in _choices(job, space, choice):
        tried.append((variant, fullest_rank(job, variant)))
        if tried[-1][1].total <= job.limit_bytes:
            return tried[-1]
    return min(tried, key=lambda pair: pair[1].total)


def _choices(job: Job, space: Space, choice: Choice) -> Iterator[Choice]:
    """Yield every recomputation and sharding, cheapest first."""
    layout = choice.layout
    sharded = job.software.shards != "none"  # such software also shards the optimizer's state
    shares = layout.size("replica_sum") > 1 and not sharded
    shardings = dict.fromkeys(shard if shares else "none" for shard in space.shard)
    parts = layout.tensor_parallel_size > 1 and not layout.sequence_parallel
    for recompute in space.recompute:
        for distribute in (False, True) if recompute == "full" and parts else (False,):
            for shard in shardings:
                yield replace(
                    choice,
                    recompute=recompute,
                    distribute_saved_activations=distribute,
                    shard=shard,
                )


def _slower(best: Sequence[Candidate], candidates: Sequence[Candidate]) -> Iterator[UnfitSize]:
    """Yield the fastest candidate of each (t, p, c, e) that is not among the best."""
    shown = {candidate.degrees for candidate in best}
    for degrees, candidate in {
        item.degrees: item for item in sorted(candidates, key=_order, reverse=True)
    }.items():
        if degrees not in shown:
            first = best[0].time
            time = candidate.time
            excess = {name: seconds - first.parts[name] for name, seconds in time.parts.items()}
            part = max(excess, key=lambda name: excess[name])
            reason = (
                f"takes {time.total / first.total:.2f} times the time of the best, "
                f"{time.parts[part] / time.total:.0%} of it for {part}"
            )
            yield UnfitSize(what=degrees, reason=f"{reason} ({candidate.choice.describe()})")


def _simulated(job: Job, candidate: Candidate) -> Candidate:
    layout = candidate.choice.layout
    size = layout.num_stages * candidate.choice.num_microbatches
    if layout.pipeline_parallel_size == 1 or size > _SIMULATED:
        return candidate
    return replace(candidate, time=simulated_step_time(job, candidate.choice), simulated=True)


def _order(candidate: Candidate) -> tuple[float, int, int, int, float]:
    """Return a sort key that puts faster candidates first.

    Among equally fast ones, the order is: fewer ways of splitting the model, fewer parts, the
    simpler schedule, less memory.
    """
    layout = candidate.choice.layout
    schedules = list(FAMILIES)
    degrees = [layout.size(axis.name) for axis in AXES if axis.name != "data"]
    return (
        float(f"{candidate.time.total:.{_DIGITS}g}"),
        sum(degree > 1 for degree in degrees),
        math.prod(degrees),
        schedules.index(candidate.choice.schedule),
        candidate.memory.total,
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
