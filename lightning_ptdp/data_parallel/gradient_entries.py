"""Layout of a rank's gradients and of the tensors that the optimizer steps on.

Both follow from the records of the parameters and the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.bucket import HALF
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters
from lightning_ptdp.data_parallel.reduction import BucketEntry, Reduction
from lightning_ptdp.data_parallel.unbucketed_gradients import UnbucketedGradients
from lightning_ptdp.parameters.records import Records
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["lay_out", "make_stepped", "needs_masters"]


def needs_masters(config: PTDPConfig, records: Records) -> bool:
    """Return True if the optimizer steps on float32 copies."""
    return config.master_weights and any(p.dtype in HALF for p in records if p.requires_grad)


def lay_out(
    *,
    config: PTDPConfig,
    mesh: ProcessMesh,
    records: Records,
    launched: Callable[[int | None, Any], None],
) -> GradientBuckets | UnbucketedGradients:
    """Return buckets if a gradient must be summed over ranks that read different data.

    Otherwise return gradients as autograd creates them.
    """
    layout = mesh.layout
    # also on a rank without such a parameter
    sharded = (
        (),
        *((axis.name,) for axis in layout.blocked),
    )
    wanted = sorted(
        {*map(layout.summed, sharded), *(record.data_axes for record in records.values())}
    )
    reductions = {axes: _reduction(config, mesh, axes) for axes in wanted}
    entries = [
        BucketEntry(
            parameter=parameter,
            chunk=record.stages[0] if len(record.stages) == 1 else None,
            reduction=reductions[record.data_axes],
            sums=record.sums,
            tied=record.tied,
        )
        for parameter, record in sorted(records.items(), key=lambda item: item[1].order)
        if parameter.requires_grad
    ]
    widen = config.master_weights and config.gradient_dtype == "float32"
    if all(reduction.size == 1 for reduction in reductions.values()):
        return UnbucketedGradients(entries, widen=widen)
    return GradientBuckets(
        entries,
        scatters=any(reduction.scatter for reduction in reductions.values()),
        bucket_bytes=None if config.bucket_mb is None else int(config.bucket_mb * 2**20),
        widen=widen,
        launched=launched,
    )


def _reduction(config: PTDPConfig, mesh: ProcessMesh, axes: tuple[str, ...]) -> Reduction:
    nodes, size = config.data_parallel_replicas, math.prod(map(mesh.layout.size, axes))
    inner, outer = mesh.levels(axes, nodes if size % nodes == 0 else 1)
    return Reduction(
        inner=inner,
        outer=outer,
        scatter=config.shard_optimizer and inner.size > 1,
        dtype=_dtype(config.reduce_dtype),
        outer_dtype=_dtype(config.inter_node_reduce_dtype),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def make_stepped(
    gradients: GradientBuckets | UnbucketedGradients, *, config: PTDPConfig, records: Records
) -> OptimizerParameters | None:
    """Return the tensors on which the optimizer steps; None if these are the parameters."""
    masters = needs_masters(config, records)
    return (
        OptimizerParameters(gradients, masters=masters) if masters or gradients.scatters else None
    )
