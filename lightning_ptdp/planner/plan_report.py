"""A plan as text and as data."""

from __future__ import annotations

import math
from dataclasses import asdict

import yaml

from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.output import titled_columns
from lightning_ptdp.planner.job import Job
from lightning_ptdp.planner.picture import bars
from lightning_ptdp.planner.search import Candidate, Plan

_GIB = 2**30


def table(plan: Plan) -> str:
    """Return a plan as text; at least one layout must fit.

    The text has one line for the job, a table and bars of the best layouts, and the memory, time
    and options of the best one.
    """
    assert plan.best
    job = plan.job
    sharded = job.software.shards != "none"
    rows = [_row(index, candidate, sharded=sharded) for index, candidate in enumerate(plan.best, 1)]
    best = plan.best[0]
    memory = [f"{name} {_gib(value)}" for name, value in best.memory.parts.items() if value]
    time = best.time
    shares = [f"{name} {value / time.total:.1%}" for name, value in time.parts.items() if value]
    lines = [
        _job(job),
        "",
        titled_columns(rows, words=(1, 4, 5, 6)),
        "",
        f"memory of the fullest rank of 1 (pipeline rank {best.memory.pipeline_rank}) in GiB, of "
        f"{job.room}:",
        f"  {', '.join(memory)}",
        "host memory of each node with snapshot_every_n_steps, in GiB: "
        f"/dev/shm {_gib(2 * job.snapshot_bytes)}, buffers {_gib(job.snapshot_bytes)}",
        "step time of 1:",
        f"  {', '.join(shares)}",
        "",
        bars(plan),
        "",
        *_to_paste(job, best, sharded=sharded),
    ]
    return "\n".join(lines)


def _to_paste(job: Job, best: Candidate, *, sharded: bool) -> list[str]:
    if sharded:
        return [
            f"no options to paste: {job.software.name} shards parameters in another way than "
            "shard='parameters'. For options, plan with --software ours"
        ]
    return [
        "to use 1 in a script:",
        f"  {strategy_arguments(best)}",
        "with ptdp fit, in a file whose base has the model and the data:",
        *(f"  {line}" for line in fit_options(job, best).splitlines()),
    ]


def strategy_arguments(candidate: Candidate) -> str:
    """Return the strategy of a candidate as Python code.

    An example is ``PTDPStrategy(tensor_parallel_size=2, num_microbatches=8)``.
    """
    arguments = (f"{name}={value!r}" for name, value in candidate.choice.options().items())
    return f"PTDPStrategy({', '.join(arguments)})"


def fit_options(job: Job, candidate: Candidate) -> str:
    """Return the configuration of ``ptdp fit`` for a candidate, in YAML.

    Defaults are included, because the base configuration may have other values.
    """
    node = job.cluster.node_size
    devices = job.world_size if job.world_size <= node else math.gcd(job.world_size, node)
    microbatches = {
        "micro_batch_size": candidate.choice.micro_batch_size,
        "num_microbatches": candidate.choice.num_microbatches,
    }
    trainer = {
        "devices": devices,
        "num_nodes": job.world_size // devices,
        "accumulate_grad_batches": 1,  # the batch contains what the base accumulates
        "precision": job.precision.name,
        "strategy": {
            "class_path": "lightning_ptdp.PTDPStrategy",
            "init_args": candidate.choice.all_options(),
        },
    }
    return yaml.safe_dump(
        {"trainer": trainer, "data": {"init_args": microbatches}}, sort_keys=False
    )


def explain_rejected(plan: Plan) -> str:
    """Return the reasons that sizes were rejected, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for misfit in plan.rejected:
        reasons.setdefault(misfit.reason, []).append(misfit.what)
    rows = [f"  {listed(dict.fromkeys(names), 4)}: {reason}" for reason, names in reasons.items()]
    slower = [f"  {misfit.what}: {misfit.reason}" for misfit in plan.slower]
    return "\n".join(["rejected:", *(rows or ["  nothing"]), "slower:", *(slower or ["  nothing"])])


def as_data(plan: Plan) -> dict[str, object]:
    """Return the plan as plain dictionaries and lists for JSON.

    Times are in seconds, memory in bytes.
    """
    job = plan.job
    return {
        "job": {
            "parameters": job.shape.parameters,
            "active_parameters": job.shape.active_parameters,
            "trained": job.trained,
            "world_size": job.world_size,
            "global_batch_size": job.global_batch_size,
            "sequence_length": job.sequence_length,
            "device": job.device.name,
            "precision": job.precision.name,
            "software": job.software.name,
            "usable_bytes": job.device.usable_bytes,
            "reserve": job.reserve,
            "snapshot_bytes": job.snapshot_bytes,
        },
        "examined": plan.examined,
        "best": [_candidate(candidate) for candidate in plan.best],
        "rejected": [asdict(misfit) for misfit in plan.rejected],
        "slower": [asdict(misfit) for misfit in plan.slower],
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    layout = candidate.choice.layout
    memory = candidate.memory
    time = candidate.time
    return {
        "layout": layout.describe(),
        "data_parallel_size": layout.data_parallel_size,
        "schedule": candidate.choice.schedule if layout.pipeline_parallel_size > 1 else None,
        "micro_batch_size": candidate.choice.micro_batch_size,
        "strategy": candidate.choice.options(),
        "memory": {"total": memory.total, "parameters": memory.parameters, **memory.parts},
        "time": {"total": time.total, **time.parts},
        "tflops": time.tflops,
        "mfu": time.mfu,
        "bubble": time.bubble_fraction,
        "simulated": candidate.simulated,
    }


def _job(job: Job) -> str:
    total = job.shape.parameters
    active = job.shape.active_parameters
    text = f"{_count(total)} parameters"
    if active < total:
        text += f", {_count(active)} of them active"
    if job.trained < 1:
        text += f", {_count(job.trained * total)} of them trained"
    text += (
        f", {job.world_size} x {job.device.name}, batch {job.global_batch_size} x "
        f"{job.sequence_length} tokens, {job.precision.name}"
    )
    return text if job.software.name == "ours" else f"{text}, {job.software.name}"


def _count(number: float) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.1f} B"
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:.0f}"


def _row(index: int, candidate: Candidate, *, sharded: bool) -> dict[str, str]:
    choice = candidate.choice
    time = candidate.time
    recompute = choice.recompute + (" 1/t" if choice.distribute_saved_activations else "")
    return {
        "": str(index),
        "layout": choice.describe_layout(),
        "b": str(choice.micro_batch_size),
        "m": str(choice.num_microbatches),
        "schedule": choice.schedule if choice.p > 1 else "-",
        "recompute": recompute,
        "shard": "parameters" if sharded else choice.shard,
        "step s": f"{time.total:.3g}",
        "TFLOP/s": f"{time.tflops:.3g}",
        "MFU": f"{time.mfu:.1%}",
        "bubble": f"{time.bubble_fraction:.1%}",
        "memory GiB": _gib(candidate.memory.total),
    }


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.3g}"
