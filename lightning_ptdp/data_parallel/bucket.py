"""A bucket: one contiguous buffer of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_ptdp.data_parallel.flat_shards import Shard
from lightning_ptdp.data_parallel.reduction import BucketEntry, Reduction

__all__ = ["ALIGNMENT", "HALF", "Bucket", "aligned"]

HALF = (torch.float16, torch.bfloat16)
ALIGNMENT = 32  # elements; keeps every view on a 128-byte boundary for float32


@dataclass(eq=False)
class Bucket:
    """One contiguous buffer of gradients.

    Attributes:
        entries: Parameters of the bucket, in backward order.
        offsets: Offset of each entry in the buffer.
        buffer: (n,) gradients. A few elements between parameters and at the end belong to no
            parameter and stay zero.
        views: Each entry's part of the buffer, in the parameter's shape.
    """

    entries: list[BucketEntry]
    offsets: list[int]
    buffer: Tensor
    views: list[Tensor]
    pending: int = 0
    launched: bool = False

    @property
    def reduction(self) -> Reduction:
        """Return the reduction that sums the bucket."""
        return self.entries[0].reduction

    @cached_property
    def next_begins(self) -> dict[int, int]:
        """Map the end of each entry to the aligned offset of the next one."""
        ends = {
            offset + entry.parameter.numel()
            for entry, offset in zip(self.entries, self.offsets, strict=True)
        }
        return {end: aligned(end) for end in ends}

    def mine(self) -> Tensor:
        """Return the part of the buffer that holds the sums after ``finish``."""
        return self.reduction.mine(self.buffer)

    def own_shards(self) -> Iterator[tuple[BucketEntry, Shard]]:
        """Yield the part of each parameter that ``mine`` holds."""
        start = int(self.mine().storage_offset() - self.buffer.storage_offset())
        stop = start + self.mine().numel()
        for entry, offset in zip(self.entries, self.offsets, strict=True):
            first, last = max(start, offset), min(stop, offset + entry.parameter.numel())
            if first < last:
                yield (
                    entry,
                    Shard(tuple(entry.parameter.shape), first - offset, last - offset, first),
                )


def aligned(size: int) -> int:
    """Return the next aligned offset after ``size`` elements."""
    return -(-size // ALIGNMENT) * ALIGNMENT
