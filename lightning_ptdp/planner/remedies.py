"""Reasons that no layout fits, and changes that would help."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_ptdp.base.errors import listed
from lightning_ptdp.planner.job import Job
from lightning_ptdp.planner.plan_report import room
from lightning_ptdp.planner.search import Plan, search
from lightning_ptdp.planner.search_space import Space

_GIB = 2**30
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
    possible = search(unlimited, _smallest(space), count=10**6, simulate=False).best
    if not possible:
        sizes = f"{job.world_size} devices and a batch of {job.global_batch_size}"
        return f"no layout divides {sizes}: {_indivisible(plan)}. {_other_sizes(job, space)}"
    least = min(possible, key=lambda candidate: candidate.memory.total)
    part = max(least.memory.parts, key=lambda name: least.memory.parts[name])
    need = (
        f"no layout fits on {job.world_size} x {job.device.name} with {room(job)} each. "
        f"{least.choice.describe()} needs the least memory, {least.memory.total / _GIB:.3g} "
        f"GiB, mostly for {part}"
    )
    remedies = [
        remedy
        for remedy in (
            _smaller_reserve(job, least.memory.total),
            _unrestricted(job),
            _more_devices(job, space),
        )
        if remedy
    ]
    return f"{need}; {', or '.join(remedies) if remedies else 'use devices with more memory, or a smaller model'}"


def _smallest(space: Space) -> Space:
    """Return the space with only the recomputation and sharding that hold least."""
    return replace(space, recompute=space.recompute[-1:], shard=space.shard[-1:])


def _indivisible(plan: Plan) -> str:
    reasons = list(dict.fromkeys(f"{misfit.what}: {misfit.reason}" for misfit in plan.rejected))
    return listed(reasons, 3, "; ")


def _other_sizes(job: Job, space: Space) -> str:
    """Return the nearest batch or number of devices with which a layout fits.

    The batch is the next one that every number of replicas divides. The number of devices is the
    nearest smaller one.
    """
    tried = [
        replace(job, global_batch_size=-(-job.global_batch_size // job.world_size) * job.world_size)
    ]
    tried += [
        replace(job, world_size=world)
        for world in range(job.world_size - 1, max(0, job.world_size - _NEAR), -1)
    ]
    remedies = []
    for jobs in (tried[:1], tried[1:]):
        fitting = next(
            (trial for trial in jobs if search(trial, space, count=1, simulate=False).best), None
        )
        if fitting is not None:
            remedies.append(
                f"--batch {fitting.global_batch_size}"
                if fitting.world_size == job.world_size
                else f"--world {fitting.world_size}"
            )
    return f"Use {' or '.join(remedies)}" if remedies else "Use other sizes, or fewer restrictions"


def _smaller_reserve(job: Job, needed: float) -> str:
    share = math.floor(100 * (1 - needed / job.device.usable_bytes)) / 100
    if 0 <= share < job.reserve:
        return f"with --reserve {share:g} it fits, if the estimate is exact"
    return ""


def _unrestricted(job: Job) -> str:
    best = search(job, count=1, simulate=False).best
    return f"without the restrictions {best[0].choice.describe()} fits" if best else ""


def _more_devices(job: Job, space: Space) -> str:
    for power in range(1, _DOUBLED + 1):
        world = job.world_size * 2**power
        batch = (
            -(-job.global_batch_size // world) * world
            if job.global_batch_size < world
            else job.global_batch_size
        )
        for samples in (job.global_batch_size, batch):
            best = search(
                replace(job, world_size=world, global_batch_size=samples),
                space,
                count=1,
                simulate=False,
            ).best
            if best:
                larger = f" with --batch {samples}" if samples != job.global_batch_size else ""
                return (
                    f"{world} of these devices would be enough{larger} "
                    f"({best[0].choice.describe()})"
                )
    return ""
