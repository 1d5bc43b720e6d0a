"""Checks that ranks which must see the same thing do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.errors import PTDPError
from lightning_ptdp.nested import Nested, iterate_tensors
from lightning_ptdp.world.mesh import Group

__all__ = ["BatchMismatchError", "KeptModuleError", "check_kept_alike", "check_same_batch", "has_same_length"]

_ROUNDING = 1e-5


class BatchMismatchError(PTDPError, RuntimeError):
    """Ranks of one replica read different samples."""


class KeptModuleError(PTDPError, RuntimeError):
    """A module that every pipeline stage keeps has become another one on each."""


def check_kept_alike(tensors: Mapping[str, Tensor], *, group: Group, device: torch.device) -> None:
    """Compare the parameters of modules that every stage keeps; collective over the stages.

    Raises:
        KeptModuleError: They differ. An average of the model's weights does, which each stage forms with the weights that it has.
    """
    low = torch.stack([tensor.detach().abs().sum(dtype=torch.float64) for tensor in tensors.values()]).to(device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group.handle)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group.handle)
    differs = (high - low > _ROUNDING * high).tolist()
    name = next((name for name, differs_here in zip(tensors, differs, strict=True) if differs_here), None)
    if name is not None:
        raise KeptModuleError(
            f"'{name}' is kept by every pipeline stage (ParallelPlan.everywhere), but has other values on each: a hook or the step changes "
            "it with weights of which a stage has its own only, as an average of the model's weights (AveragedModel, EMA) does. Use "
            "pipeline_parallel_size=1 for that"
        )


def check_same_batch(batch: Nested, *, group: Group, rank: int, device: torch.device) -> None:
    """Compare the batch over the ranks of one replica; collective.

    Raises:
        BatchMismatchError: It differs, which would silently train on nonsense.
    """
    if group.size == 1:
        return
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for index, tensor in enumerate(iterate_tensors(batch)):
        total[0] += tensor.numel() * (index + 1)
        if tensor.numel():
            total[1] += tensor.detach().to(device=device, dtype=torch.float64).nan_to_num().flatten().cumsum(0).mean()
    low, high = total.clone(), total.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group.handle)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group.handle)
    if not torch.equal(low, high):
        raise BatchMismatchError(
            f"rank {rank} and the other ranks of its replica {group.ranks} read different batches. All ranks of a replica must read "
            "the same samples: shard data by trainer.strategy.distributed_sampler_kwargs (replica number and count), not by global rank, "
            "and seed shuffling equally"
        )


def has_same_length(loader: Collection[object], *, group: Group, device: torch.device) -> bool:
    """Return True if the members' loaders are known to give the same number of batches; collective."""
    if group.size == 1:
        return True
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):  # Python's and torch's ways to say that a loader has no length
        length = -1
    extremes = torch.tensor([length, -length], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group.handle)
    least, greatest = extremes.tolist()
    return bool(length >= 0 and least == -greatest)
