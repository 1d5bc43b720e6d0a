"""Time of collectives and messages between ranks, as training uses them.

Each operation runs after a matrix product, in groups of each size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.base.forked_processes import Tell
from lightning_ptdp.doctor.bandwidth import collectives
from lightning_ptdp.doctor.collective_checks import GroupMember
from lightning_ptdp.world.axes import divisors

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
_MOST = 12
_LEAST = 4
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
            for name, run in _operations(place, group, members, size):
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


def _operations(
    place: GroupMember, group: Any, members: int, size: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    yield from collectives(place, group, members, size)
    if members == 2:
        buffer = place.full(-(-size // (4 * members)) * members, 1)
        yield "send", lambda: dist.send(buffer, 1) if place.rank == 0 else dist.recv(buffer, 0)


def _beyond_product(
    place: GroupMember, run: Callable[[], object], size: int
) -> tuple[float, float]:
    """Return the additional seconds of an operation after a product.

    The second number is the seconds of CPU cores that the operation uses.
    """
    a, b, result = (torch.randn(shape, device=place.device) for shape in _PRODUCT)
    repetitions = max(_LEAST, min(_MOST, _MOST_BYTES // size))

    def best_round(*parts: Callable[[], object]) -> tuple[float, float]:
        # The best round counts, because this clock includes interruptions, in contrast to a
        # thread's clock (calibration.py).
        return min(run_round(parts) for _ in range(_ROUNDS))

    def run_round(parts: Sequence[Callable[[], object]]) -> tuple[float, float]:
        seconds = []
        used = time.process_time()
        for _ in range(repetitions):
            start = time.perf_counter()
            for part in parts:
                part()
            if place.device.type == "cuda":
                torch.cuda.synchronize(place.device)
            seconds.append(time.perf_counter() - start)
        return median(seconds), (time.process_time() - used) / repetitions

    def product() -> object:
        return torch.mm(a, b, out=result)

    run()
    alone, used = best_round(run)
    if place.device.type == "cuda":  # the device waits, not the host
        return alone, 0.0
    return max(alone, best_round(product, run)[0] - best_round(product)[0]), used
