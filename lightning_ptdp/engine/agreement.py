"""Checks that ranks which must see the same thing do."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from lightning_ptdp.errors import PTDPError
from lightning_ptdp.nested import Nested, iterate_tensors
from lightning_ptdp.world.mesh import Group

__all__ = ["BatchMismatchError", "check_same_batch", "has_same_length"]


class BatchMismatchError(PTDPError, RuntimeError):
    """Ranks of one replica read different samples."""


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
