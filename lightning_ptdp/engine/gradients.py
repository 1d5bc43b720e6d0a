"""Which gradients a rank keeps, how they are summed, and what the optimizer steps on: from the layout and the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import (
    HALF,
    BucketEntry,
    FlatSharding,
    GradientBuckets,
    LooseGradients,
    Reduction,
    Stepped,
    SteppedParameters,
)
from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.tensor_parallel import Sharding

__all__ = ["check_held", "check_recorded", "counted_gradients", "make_gradients", "make_stepped", "needs_masters", "sharding_of"]


def needs_masters(config: PTDPConfig, parallel: ParallelModel) -> bool:
    """Whether the optimizer shall step on float32 copies."""
    return config.master_weights and any(p.dtype in HALF for p in parallel.records if p.requires_grad)


def check_recorded(module: nn.Module, parallel: ParallelModel) -> None:
    """Check that every trainable parameter is one that was laid out over the ranks.

    Raises:
        ValueError: Some are not; names them.
    """
    unknown = [name for name, p in module.named_parameters() if p.requires_grad and p not in parallel.records]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}: made or replaced after the model was laid out over the "
            "ranks, so nothing would sum or save it. Make parameters in __init__ or configure_model, before the optimizer"
        )


def check_held(optimizer: Optimizer, parallel: ParallelModel) -> None:
    """Check that what the optimizer steps on was laid out over the ranks.

    Raises:
        ValueError: A parameter of it was not, so that it would never change, or change differently on each replica.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    unknown = next((parameter for parameter in held if parameter not in parallel.records), None)
    if unknown is not None:
        raise ValueError(
            f"{type(optimizer).__name__} holds a parameter of shape {tuple(unknown.shape)} that is not in the model which this rank "
            "trains: make the optimizer in configure_optimizers, from self.parameters(), and not before fit. A loss with parameters has "
            "to be an attribute of the LightningModule"
        )


def make_gradients(
    *, config: PTDPConfig, mesh: ProcessMesh, parallel: ParallelModel, launched: Callable[[int | None, Any], None]
) -> GradientBuckets | LooseGradients:
    """Buckets where something has to be summed over ranks that read something else, else gradients as autograd makes them."""
    every = tuple(axis.name for axis in mesh.layout.axes if axis.reads != "same")  # also of a rank that has no parameter
    wanted = sorted({every, *(record.data_axes for record in parallel.records.values())})
    reductions = {axes: _reduction(config, mesh, axes) for axes in wanted}
    entries = [
        BucketEntry(
            parameter=parameter,
            chunk=record.stages[0] if len(record.stages) == 1 else None,
            reduction=reductions[record.data_axes],
            sums=record.sums,
            tied=record.tied,
        )
        for parameter, record in sorted(parallel.records.items(), key=lambda item: item[1].order)
        if parameter.requires_grad
    ]
    widen = config.master_weights and config.gradient_dtype == "float32"
    if all(reduction.size == 1 for reduction in reductions.values()):
        return LooseGradients(entries, widen=widen)
    return GradientBuckets(
        entries,
        scatters=any(reduction.scatter for reduction in reductions.values()),
        bucket_bytes=int(config.bucket_mb * 2**20),
        widen=widen,
        launched=launched,
    )


def _reduction(config: PTDPConfig, mesh: ProcessMesh, axes: tuple[str, ...]) -> Reduction:
    inner, outer = mesh.levels(axes, config.data_parallel_replicas)
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
    gradients: GradientBuckets | LooseGradients, *, config: PTDPConfig, parallel: ParallelModel
) -> SteppedParameters | None:
    """What the optimizer steps on; None if that is the parameters."""
    masters = needs_masters(config, parallel)
    scatters = isinstance(gradients, GradientBuckets) and gradients.scatters
    return SteppedParameters(gradients, masters=masters) if masters or scatters else None


def sharding_of(stepped: Stepped, parallel: ParallelModel) -> Sharding | FlatSharding:
    """How a tensor of the optimizer sits in the full parameter."""
    whole = parallel.records[stepped.parameter].sharding
    return whole if stepped.shard is None else FlatSharding(whole=whole, shard=stepped.shard)


def counted_gradients(
    stepped: SteppedParameters | None, *, parallel: ParallelModel, optimizer: Optimizer | None = None
) -> list[Tensor]:
    """Gradients, or views of them, that this rank counts in the norm: of all parameters, or of those that ``optimizer`` steps on."""
    if stepped is None:
        mine: list[tuple[Any, Any, Tensor]] = [(p, record.sharding, p) for p, record in parallel.records.items()]
    else:
        mine = [(entry.parameter, sharding_of(entry, parallel), entry.value) for entry in stepped.entries if entry.counts]
    chosen = None if optimizer is None else {value for group in optimizer.param_groups for value in group["params"]}
    return [
        part
        for parameter, sharding, value in mine
        if parallel.records[parameter].counted and value.grad is not None and (chosen is None or value in chosen)
        for part in sharding.counted(value.grad)
    ]
