"""Speed of messages and collectives at a few sizes, shown to users and measured for the planner.

Bytes per second are those of the links and comparable between numbers of ranks, as in NVIDIA's
nccl-tests. For x bytes, each rank's link carries 2 (n - 1) / n · x in an all-reduce,
(n - 1) / n · x in a reduce-scatter or an all-gather of x bytes in total, and x in a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.forked_processes import Tell
from lightning_ptdp.doctor.machine_checks import Check, ok, warning
from lightning_ptdp.shims.torch_distributed import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.axes import divisors

SIZES = (8 * 2**10, 2**20, 32 * 2**20)
"""Sizes in bytes."""

_BUDGET_S = 0.1
_MOST = 50
_LEAST = 3
_ELEMENT = 4
# Links of one kind differ by some 10 to 20 %.
_SLOW = 0.5


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """A process in the group.

    It has a rank, the number of ranks, and the device of the tensors that it sends.
    """

    rank: int
    size: int
    device: torch.device

    def full(self, count: int, value: float) -> Tensor:
        """Return ``count`` float32 numbers of this value on the device."""
        return torch.full((count,), float(value), device=self.device)


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
        for name, operation, share in _world_operations(place, size)
    ]


def check_links(measurements: Sequence[Measurement]) -> Check:
    """Check that the links between all neighbours are about equally fast for large messages."""
    largest = max(measurement.size for measurement in measurements)
    rates = {
        measurement.operation: measurement.bytes_per_s
        for measurement in measurements
        if measurement.size == largest and measurement.operation.startswith("send")
    }
    slowest = min(rates, key=lambda operation: rates[operation])
    ends = dict.fromkeys(f"{rate / 1e9:.2f}" for rate in (rates[slowest], max(rates.values())))
    finding = f"{' to '.join(ends)} GB/s between neighbours"
    if rates[slowest] < _SLOW * max(rates.values()):
        remedy = (
            "do not use this link for tensor-parallel ranks, or check its cable, its PCIe "
            "slot and nvidia-smi topo -m"
        )
        return warning("links", f"{finding}; the slowest is {slowest}", remedy)
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


def _world_operations(place: GroupMember, size: int) -> Iterator[tuple[str, _Operation, float]]:
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
    usual = usual_s(place.device, operation, budget_s=_BUDGET_S, agree=partial(_agreed, place))
    seconds = _agreed(place, usual)
    trips = 2 if name.startswith("send") else 1
    return Measurement(
        operation=name, size=size, seconds=seconds / trips, bytes_per_s=share * size / seconds
    )


def usual_s(
    device: torch.device,
    run: _Operation,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    agree: Callable[[float], float] = float,
) -> float:
    """Return the median seconds of a run, after a first run that may create connections.

    Args:
        device: Device that runs it.
        run: The run.
        budget_s: Seconds of all repetitions together.
        clock: The clock.
        agree: Maps the seconds of a run to those on which the ranks agree.
    """
    run()
    single = max(agree(seconds_of(device, run, clock=clock)), 1e-9)
    repetitions = min(max(int(budget_s / single), _LEAST), _MOST)
    return max(median(seconds_of(device, run, clock=clock) for _ in range(repetitions)), 1e-9)


def seconds_of(
    device: torch.device, *runs: _Operation, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of the runs, one after the other, including the device's."""
    _synchronize(device)
    start = clock()
    for run in runs:
        run()
    _synchronize(device)
    return clock() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(place: GroupMember, seconds: float) -> float:
    """Return the longest time of all ranks."""
    longest = place.full(1, seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


# ---- Links as training uses them, for the planner ------------------------------------------------
#
# Each operation runs after a matrix product, in groups of each size.


LINK_SIZES = (16 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 32 * 2**20)
"""Sizes in bytes."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Measurements of one rank.

    Attributes:
        seconds: (operation, members of the group, bytes) -> seconds; 0 members for messages.
        waiting: Share of a core that this process used during the collectives.
    """

    seconds: Mapping[tuple[str, int, int], float]
    waiting: float = 0.0


_ROUNDS = 3
_REPETITIONS = (4, 12)
_MOST_BYTES = 64 * 2**20
_PRODUCT = ((1024, 256), (256, 512), (1024, 512))


def measure_links(place: GroupMember, tell: Tell, *, cores: int) -> Links:
    """Measure the links between ranks, one group at a time.

    Collective: all ranks call it at the same time. If a group has more members than there are
    cores, the additional time is not caused by the links and is removed.

    A rank in a collective waits for the other ranks. On a CPU, it also waits until the threads that
    send and receive are awake. An immediately repeated collective does not show this delay. Each
    operation therefore runs after a product, whose own time is subtracted.
    """
    times: dict[tuple[str, int, int], float] = {}
    used = waited = 0.0
    for members in divisors(place.size):
        if members == 1:
            continue
        group: Any = dist.new_group(list(range(members)))
        share = min(1.0, cores / members) if cores else 1.0
        for size in LINK_SIZES:
            for name, run in _group_operations(place, group, members, size):
                tell(f"{name} of {size} bytes among {members}")
                dist.barrier()
                if place.rank < members:
                    seconds, busy = _beyond_product(place, run, size)
                    times[name, 0 if name == "send" else members, size] = max(1e-9, share * seconds)
                    if members <= cores:
                        used = used + busy
                        waited = waited + seconds
        dist.barrier()
    return Links(seconds=times, waiting=min(1.0, used / waited) if waited else 0.0)


def _group_operations(
    place: GroupMember, group: Any, members: int, size: int
) -> Iterator[tuple[str, _Operation]]:
    yield from collectives(place, group, members, size)
    if members == 2:
        buffer = place.full(-(-size // (4 * members)) * members, 1)
        yield "send", lambda: dist.send(buffer, 1) if place.rank == 0 else dist.recv(buffer, 0)


def _beyond_product(place: GroupMember, run: _Operation, size: int) -> tuple[float, float]:
    """Return the additional seconds of an operation after a product.

    The second number is the seconds of CPU cores that the operation uses.
    """
    a, b, result = (torch.randn(shape, device=place.device) for shape in _PRODUCT)
    least, most = _REPETITIONS
    repetitions = max(least, min(most, _MOST_BYTES // size))

    def best_round(*parts: _Operation) -> tuple[float, float]:
        # The best round counts, because this clock includes interruptions, in contrast to a
        # thread's clock (calibration.py).
        return min(run_round(*parts) for _ in range(_ROUNDS))

    def run_round(*parts: _Operation) -> tuple[float, float]:
        used = time.process_time()
        seconds = median(seconds_of(place.device, *parts) for _ in range(repetitions))
        return seconds, (time.process_time() - used) / repetitions

    def product() -> object:
        return torch.mm(a, b, out=result)

    run()
    alone, used = best_round(run)
    if place.device.type == "cuda":  # the device waits, not the host
        return alone, 0.0
    return max(alone, best_round(product, run)[0] - best_round(product)[0]), used
