"""Search for a job's best layouts, with the reasons that the other layouts are worse or do not fit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_ptdp.base.errors import listed
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
"""Digits to which times are rounded for comparison: sums in another order differ by rounding."""
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
            reason = (
                f"parameters, gradients and optimizer state alone need {_gib(need)} of "
                f"{_gib(job.limit_bytes)}"
            )
            rejected.append(UnfitSize(layout.describe(), reason))
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
            rejected.append(UnfitSize(layout.describe(), reason))
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
    # The fullest rank has no less than the mean.
    parameters = sum(stage.parameters for stage in stages) / choice.p
    experts = sum(stage.experts for stage in stages) / choice.p
    return sum(static_bytes(job, smallest, parameters, experts))


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
            yield UnfitSize(degrees, f"{reason} ({candidate.choice.describe()})")


def _simulated(job: Job, candidate: Candidate) -> Candidate:
    choice = candidate.choice
    if choice.p == 1 or choice.layout.num_stages * choice.num_microbatches > _SIMULATED:
        return candidate
    return replace(candidate, time=simulated_step_time(job, choice), simulated=True)


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


# ---- Reasons that no layout fits, and changes that would help ------------------------------------


_PLENTY = 1e18
_DOUBLED = 10
_NEAR = 64


def why_nothing_fits(plan: Plan, space: Space) -> str:
    """Return in one sentence the reason that no layout fits, and what would help.

    Other sizes help if no layout divides the given ones. Otherwise fewer restrictions or more
    devices help.

    Args:
        plan: Result of a search that found nothing.
        space: The searched space.
    """
    job = plan.job
    unlimited = replace(job, device=replace(job.device, memory_bytes=_PLENTY))
    # only the recomputation and sharding that hold least
    smallest = replace(space, recompute=space.recompute[-1:], shard=space.shard[-1:])
    possible = search(unlimited, smallest, count=10**6, simulate=False).best
    if not possible:
        sizes = f"{job.world_size} devices and a batch of {job.global_batch_size}"
        return f"no layout divides {sizes}: {_indivisible(plan)}. {_other_sizes(job, space)}"
    least = min(possible, key=lambda candidate: candidate.memory.total)
    part = max(least.memory.parts, key=lambda name: least.memory.parts[name])
    need = (
        f"no layout fits on {job.world_size} x {job.device.name} with {job.room} each. "
        f"{least.choice.describe()} needs the least memory, {least.memory.total / _GIB:.3g} "
        f"GiB, mostly for {part}"
    )
    remedies = filter(
        None,
        (
            _smaller_reserve(job, least.memory.total),
            _unrestricted(job),
            _more_devices(job, space),
        ),
    )
    remedy = ", or ".join(remedies) or "use devices with more memory, or a smaller model"
    return f"{need}; {remedy}"


def _indivisible(plan: Plan) -> str:
    reasons = list(dict.fromkeys(f"{misfit.what}: {misfit.reason}" for misfit in plan.rejected))
    return listed(reasons, 3, "; ")


def _other_sizes(job: Job, space: Space) -> str:
    """Return the nearest batch or number of devices with which a layout fits.

    The batch is the next one that every number of replicas divides. The number of devices is the
    nearest smaller one.
    """
    remedies = []
    batch = -(-job.global_batch_size // job.world_size) * job.world_size
    if _fastest(replace(job, global_batch_size=batch), space):
        remedies.append(f"--batch {batch}")
    for world in range(job.world_size - 1, max(0, job.world_size - _NEAR), -1):
        if _fastest(replace(job, world_size=world), space):
            remedies.append(f"--world {world}")
            break
    return f"Use {' or '.join(remedies)}" if remedies else "Use other sizes, or fewer restrictions"


def _fastest(job: Job, space: Space | None = None) -> Choice | None:
    best = search(job, space, count=1, simulate=False).best
    return best[0].choice if best else None


def _smaller_reserve(job: Job, needed: float) -> str:
    share = math.floor(100 * (1 - needed / job.device.usable_bytes)) / 100
    if 0 <= share < job.reserve:
        return f"with --reserve {share:g} it fits, if the estimate is exact"
    return ""


def _unrestricted(job: Job) -> str:
    best = _fastest(job)
    return f"without the restrictions {best.describe()} fits" if best else ""


def _more_devices(job: Job, space: Space) -> str:
    batch = job.global_batch_size
    for power in range(1, _DOUBLED + 1):
        world = job.world_size * 2**power
        for samples in dict.fromkeys((batch, max(batch, world))):
            best = _fastest(replace(job, world_size=world, global_batch_size=samples), space)
            if best:
                larger = f" with --batch {samples}" if samples != batch else ""
                return f"{world} of these devices would be enough{larger} ({best.describe()})"
    return ""
