"""Checks that ranks which must see the same thing do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.errors import PTDPError
from lightning_ptdp.nested import Nested, iterate_tensors
from lightning_ptdp.world.mesh import Group

__all__ = ["BatchMismatchError", "batch_sums", "check_same_batch", "has_same_length"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ = 65536
"""Elements of a tensor that are read; a larger one is read in equal steps."""
_MASK = 2**62 - 1
_NOTHING = -(2**63)


class BatchMismatchError(PTDPError, RuntimeError):
    """Ranks of one replica read different samples."""


def batch_sums(batch: Nested, *, replica: int, replicas: int, device: torch.device) -> Tensor:
    """Checksum of a batch, (2 * replicas) int64 on ``device``: its maximum over ranks says whether each replica's ranks have the same.

    Sums of integers, because those of floating-point numbers may depend on the order in which a device adds.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in iterate_tensors(batch):
        total = total * 1_000_003 + _checksum(tensor).to(device, non_blocking=True)
    total = total & _MASK
    sums = torch.full((2 * replicas,), _NOTHING, dtype=torch.int64, device=device)
    sums[2 * replica] = total
    sums[2 * replica + 1] = -total
    return sums


def _checksum(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.element_size() not in _BITS:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1)[:: -(-tensor.numel() // _READ) or 1].contiguous()
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    return (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum() + tensor.numel()


def check_same_batch(agreed: Sequence[int]) -> None:
    """Check the maximum over ranks of ``batch_sums``.

    Raises:
        BatchMismatchError: On all ranks: those of a replica read different batches, which would silently train on nonsense.
    """
    for replica, (high, low) in enumerate(zip(agreed[::2], agreed[1::2], strict=True)):
        if high != -low:
            raise BatchMismatchError(
                f"the ranks of replica {replica} read different batches, but all of them must read the same samples, augmented alike. "
                "Shard data by trainer.strategy.distributed_sampler_kwargs (replica number and count), not by global rank, and seed "
                "shuffling and augmentation by the replica"
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
