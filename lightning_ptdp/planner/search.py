"""From a job to its best layouts, and why the others are worse."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ptdp.planner.closed_forms import CLOSED_FORMS
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.memory import RankMemory, fullest_rank, static_bytes
from lightning_ptdp.planner.parameters import stage_parameters
from lightning_ptdp.planner.space import Degrees, Misfit, Pipeline, Space, degrees, pipelines
from lightning_ptdp.planner.step_time import StepTime, simulated_step_time, step_time

__all__ = ["Candidate", "Plan", "search"]

_SIMULATED = 800
"""Up to so many p v m a schedule is simulated in some 20 ms."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A choice that fits, with what it needs."""

    choice: Choice
    memory: RankMemory
    time: StepTime
    simulated: bool = False
    """Whether the time is the simulator's, and not from closed forms."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search found.

    Attributes:
        job: What was planned.
        best: The fastest candidates, best first.
        rejected: What cannot be used, and why; of microbatches and schedules that do not fit in memory, the one that needs least.
        slower: Degrees that fit and are not among the best: how much longer their fastest takes, and on what.
        examined: How many choices were estimated.
    """

    job: Job
    best: tuple[Candidate, ...]
    rejected: tuple[Misfit, ...]
    slower: tuple[Misfit, ...]
    examined: int


def search(job: Job, space: Space | None = None, *, count: int = 10, simulate: bool = True) -> Plan:
    """The fastest layouts that fit in memory.

    All choices of the space are estimated by closed forms; where the parameters alone do not fit, their microbatches and schedules are not
    looked at. Of recomputation and sharding of the optimizer the first that fits is taken. The best are then timed by the simulator, as
    far as their schedules are small enough, and put in order again.

    Args:
        job: Model, devices, batch.
        space: What may be tried.
        count: How many of the best to return.
        simulate: Time the best by the simulator.

    Raises:
        ValueError: ``count`` is not positive.
    """
    if count < 1:
        raise ValueError(f"count={count!r} must be a positive integer")
    space = space or Space()
    found: list[Candidate] = []
    rejected: list[Misfit] = []
    examined = 0
    for sizes in degrees(job, space):
        if isinstance(sizes, Misfit):
            rejected.append(sizes)
            continue
        smallest = _does_not_fit_at_all(job, space, sizes)
        if smallest is not None:
            rejected.append(smallest)
            continue
        misfits: dict[Misfit, None] = {}
        nearest: tuple[float, Choice] | None = None
        fitting = 0
        for pipeline in pipelines(job, space, sizes):
            if isinstance(pipeline, Misfit):
                misfits[pipeline] = None
                continue
            examined += 1
            outcome = _first_that_fits(job, space, pipeline)
            if isinstance(outcome, Candidate):
                found.append(outcome)
                fitting += 1
            elif nearest is None or outcome[0] < nearest[0]:
                nearest = outcome
        rejected += misfits
        if nearest is not None and not fitting:
            reason = f"needs {_gib(nearest[0])} of {_gib(job.device.usable_bytes)} at least ({nearest[1].describe()})"
            rejected.append(Misfit(what=_name(sizes), reason=reason))
    best = heapq.nsmallest(count, found, key=_order)
    slower = tuple(_slower(best, found))
    if simulate:
        best = sorted((_simulated(job, candidate) for candidate in best), key=_order)
    return Plan(job=job, best=tuple(best), rejected=tuple(rejected), slower=slower, examined=examined)


def _does_not_fit_at_all(job: Job, space: Space, sizes: Degrees) -> Misfit | None:
    """Whether weights, gradients and optimizer state alone are too much."""
    pipeline = next((one for one in pipelines(job, space, sizes) if isinstance(one, Pipeline)), None)
    if pipeline is None:
        return None
    choice = next(_choices(space, pipeline, last=True))
    parameters = stage_parameters(job.model, choice.layout)
    layout = choice.layout
    least = sum(parameters) / layout.pipeline_parallel_size  # the fullest rank has no less than the mean
    need = sum(static_bytes(job, choice, least))
    if need <= job.device.usable_bytes:
        return None
    reason = f"parameters, gradients and optimizer state alone take {_gib(need)} of {_gib(job.device.usable_bytes)}"
    return Misfit(what=_name(sizes), reason=reason)


def _first_that_fits(job: Job, space: Space, pipeline: Pipeline) -> Candidate | tuple[float, Choice]:
    """The first recomputation and sharding that fits in memory; or what the smallest needs."""
    smallest: tuple[float, Choice] | None = None
    for choice in _choices(space, pipeline):
        memory = fullest_rank(job, choice)
        if memory.total <= job.device.usable_bytes:
            return Candidate(choice=choice, memory=memory, time=step_time(job, choice))
        if smallest is None or memory.total < smallest[0]:
            smallest = memory.total, choice
    assert smallest is not None
    return smallest


def _choices(space: Space, pipeline: Pipeline, *, last: bool = False) -> Iterator[Choice]:
    """Every recomputation and sharding, cheapest first; ``last``: only the one that holds least."""
    layout = pipeline.layout
    shardings = _unique(shard and layout.size("replica_sum") > 1 for shard in space.shard_optimizer)
    parts = layout.tensor_parallel_size > 1 and not layout.sequence_parallel
    for recompute in space.recompute[-1:] if last else space.recompute:
        for distribute in (False, True) if recompute == "full" and parts else (False,):
            for shard in shardings[-1:] if last else shardings:
                yield Choice(
                    layout=layout,
                    micro_batch_size=pipeline.micro_batch_size,
                    num_microbatches=pipeline.num_microbatches,
                    schedule=pipeline.schedule,
                    recompute=recompute,
                    distribute_saved_activations=distribute,
                    shard_optimizer=shard,
                )


def _unique(values: Iterator[bool]) -> Sequence[bool]:
    return list(dict.fromkeys(values))


def _slower(best: Sequence[Candidate], found: Sequence[Candidate]) -> Iterator[Misfit]:
    """The fastest of each (t, p, c) that is not among the best."""
    shown = {_sizes(candidate) for candidate in best}
    for sizes, candidate in {_sizes(one): one for one in sorted(found, key=_order, reverse=True)}.items():
        if sizes not in shown:
            first, time = best[0].time, candidate.time
            more = {name: seconds - first.parts[name] for name, seconds in time.parts.items()}
            part = max(more, key=lambda name: more[name])
            reason = f"{time.total / first.total:.2f} times as long as the best: {part} takes {time.parts[part] / time.total:.0%} of it"
            yield Misfit(what=_name(sizes), reason=f"{reason} ({candidate.choice.describe()})")


def _sizes(candidate: Candidate) -> Degrees:
    layout = candidate.choice.layout
    return Degrees(
        t=layout.tensor_parallel_size,
        c=layout.context_parallel_size,
        p=layout.pipeline_parallel_size,
        d=layout.data_parallel_size,
    )


def _simulated(job: Job, candidate: Candidate) -> Candidate:
    layout = candidate.choice.layout
    size = layout.num_stages * candidate.choice.num_microbatches
    if layout.pipeline_parallel_size == 1 or size > _SIMULATED:
        return candidate
    time = simulated_step_time(job, candidate.choice)
    return Candidate(choice=candidate.choice, memory=candidate.memory, time=time, simulated=True)


def _order(candidate: Candidate) -> tuple[float, int, float]:
    """Faster first; of equals the plainer schedule, then the one that holds less."""
    schedules = list(CLOSED_FORMS)
    return candidate.time.total, schedules.index(candidate.choice.schedule), candidate.memory.total


def _name(sizes: Degrees) -> str:
    return f"t{sizes.t} p{sizes.p}" + (f" c{sizes.c}" if sizes.c > 1 else "") + f" d{sizes.d}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
