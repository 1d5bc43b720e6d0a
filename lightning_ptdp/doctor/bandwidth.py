"""Speed of messages and collectives at a few sizes, in seconds and bytes per second.

Bytes per second are those of the links and comparable between numbers of ranks, as in NVIDIA's
nccl-tests. For x bytes, each rank's link carries 2 (n - 1) / n · x in an all-reduce,
(n - 1) / n · x in a reduce-scatter or an all-gather of x bytes in total, and x in a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.base.forked_processes import Tell
from lightning_ptdp.doctor.check import Check, ok, warning
from lightning_ptdp.doctor.collective_checks import GroupMember
from lightning_ptdp.shims.torch_distributed import all_gather_single, reduce_scatter_single

SIZES = (8 * 2**10, 2**20, 32 * 2**20)
"""Sizes in bytes."""

_BUDGET_S = 0.1
_MOST = 50
_LEAST = 3
_ELEMENT = 4
# Links of one kind differ by some 10 to 20 %.
_SLOW = 0.5


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The median of one operation.

    Attributes:
        operation: Name of the operation; that of a message includes both ranks.
        size: Size in bytes.
        seconds: Seconds of the slowest rank.
        bytes_per_s: Bytes per second over a rank's link.
    """

    operation: str
    size: int
    seconds: float
    bytes_per_s: float


def measure(place: GroupMember, tell: Tell, sizes: Sequence[int] = SIZES) -> list[Measurement]:
    """Measure messages between neighbours and three collectives.

    Collective: all ranks call it at the same time, and all get the same result.
    """
    return [
        _timed(place, tell, name, size, operation, share)
        for size in sizes
        for name, operation, share in _operations(place, size)
    ]


def check_links(measurements: Sequence[Measurement]) -> Check:
    """Check that the links between all neighbours are about equally fast for large messages."""
    largest = max(measurement.size for measurement in measurements)
    links = [
        measurement
        for measurement in measurements
        if measurement.size == largest and measurement.operation.startswith("send")
    ]
    links.sort(key=lambda measurement: measurement.bytes_per_s)
    slowest = links[0]
    quickest = links[-1]
    rates = dict.fromkeys(
        f"{measurement.bytes_per_s / 1e9:.2f}" for measurement in (slowest, quickest)
    )
    finding = f"{' to '.join(rates)} GB/s between neighbours"
    if slowest.bytes_per_s < _SLOW * quickest.bytes_per_s:
        remedy = (
            "do not use this link for tensor-parallel ranks, or check its cable, its PCIe "
            "slot and nvidia-smi topo -m"
        )
        return warning("links", f"{finding}; the slowest is {slowest.operation}", remedy)
    return ok("links", finding)


_Operation = Callable[[], object]


def collectives(
    place: GroupMember, group: Any, members: int, size: int
) -> Iterator[tuple[str, _Operation]]:
    """Yield the name of each measured collective, and its call for at least ``size`` bytes."""
    count = -(-size // (_ELEMENT * members)) * members
    buffer, shard = place.full(count, 1), place.full(count // members, 1)
    yield "all-reduce", lambda: dist.all_reduce(buffer, group=group)
    yield "reduce-scatter", lambda: reduce_scatter_single(shard, buffer, group)
    yield "all-gather", lambda: all_gather_single(buffer, shard, group)


def _operations(place: GroupMember, size: int) -> Iterator[tuple[str, _Operation, float]]:
    """Yield (name, operation on ``size`` bytes, share of the bytes that crosses a link)."""
    n = place.size
    buffer = place.full(size // _ELEMENT, 1)
    for first in range(n if n > 2 else 1):
        second = (first + 1) % n
        yield f"send {first} to {second}", _there_and_back(place, buffer, first, second), 2.0
    for name, run in collectives(place, dist.group.WORLD, n, size):
        yield name, run, (2 if name == "all-reduce" else 1) * (n - 1) / n


def _there_and_back(
    place: GroupMember, tensor: torch.Tensor, first: int, second: int
) -> _Operation:
    def run() -> None:
        if place.rank == first:
            dist.send(tensor, second)
            dist.recv(tensor, second)
        elif place.rank == second:
            dist.recv(tensor, first)
            dist.send(tensor, first)

    return run


def _timed(
    place: GroupMember, tell: Tell, name: str, size: int, operation: _Operation, share: float
) -> Measurement:
    tell(f"{name} of {size} bytes")
    operation()  # creates the connections
    single = _agreed(place, _seconds(place, operation))
    repetitions = min(max(int(_BUDGET_S / single), _LEAST), _MOST)
    median = sorted(_seconds(place, operation) for _ in range(repetitions))[repetitions // 2]
    seconds = _agreed(place, median)
    trips = 2 if name.startswith("send") else 1
    return Measurement(
        operation=name, size=size, seconds=seconds / trips, bytes_per_s=share * size / seconds
    )


def _seconds(place: GroupMember, operation: _Operation) -> float:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    start = time.perf_counter()
    operation()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    return time.perf_counter() - start


def _agreed(place: GroupMember, seconds: float) -> float:
    """Return the longest time of all ranks."""
    longest = place.full(1, seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return max(longest.item(), 1e-9)
