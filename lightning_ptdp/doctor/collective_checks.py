"""Tests of every kind of communication that training uses, each with a known answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.shims.torch_distributed import all_gather_single, reduce_scatter_single


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


def _all_reduce(place: GroupMember) -> bool:
    summed = place.full(5, place.rank + 1)
    largest = place.full(5, place.rank)
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return _is(summed, place.size * (place.size + 1) / 2) and _is(largest, place.size - 1)


def _broadcast(place: GroupMember) -> bool:
    tensor = place.full(5, place.rank)
    dist.broadcast(tensor, place.size - 1)
    return _is(tensor, place.size - 1)


def _reduce_scatter(place: GroupMember) -> bool:
    source = torch.arange(place.size, dtype=torch.float32, device=place.device).repeat_interleave(3)
    output = place.full(3, -1)
    reduce_scatter_single(output, source, dist.group.WORLD)
    return _is(output, place.rank * place.size)


def _all_gather(place: GroupMember) -> bool:
    output = place.full(3 * place.size, -1)
    all_gather_single(output, place.full(3, place.rank), dist.group.WORLD)
    return bool((output.cpu() == torch.arange(place.size).repeat_interleave(3)).all())


def _all_to_all(place: GroupMember) -> bool:
    source = place.rank * place.size + torch.arange(
        place.size, dtype=torch.float32, device=place.device
    )
    output = place.full(place.size, -1)
    dist.all_to_all_single(output, source)
    return bool((output.cpu() == torch.arange(place.size) * place.size + place.rank).all())


def _exchange(place: GroupMember, *steps: int) -> bool:
    """Send every rank's number to the rank ``step`` after it in a ring, for all steps at once."""
    received = {step: place.full(5, -1) for step in steps}
    operations: list[dist.P2POp] = []
    for tag, (step, buffer) in enumerate(received.items()):
        after, before = ((place.rank + offset) % place.size for offset in (step, -step))
        operations.append(dist.P2POp(dist.isend, place.full(5, place.rank), after, tag=tag))
        operations.append(dist.P2POp(dist.irecv, buffer, before, tag=tag))
    # All operations are one batch. The first message between two ranks blocks both until the other
    # rank joins, so separate sends in a ring would deadlock.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return all(_is(buffer, (place.rank - step) % place.size) for step, buffer in received.items())


def _objects(place: GroupMember) -> bool:
    gathered: list[Any] = [None] * place.size
    dist.all_gather_object(gathered, {"rank": place.rank})
    box = ["from the first" if place.rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    return gathered == [{"rank": rank} for rank in range(place.size)] and box == ["from the first"]


def _groups(place: GroupMember) -> bool:
    """Test the groups of neighbours, and one gloo group of all ranks.

    Training uses a gloo group beside NCCL for agreements between ranks.
    """
    right = True
    for first in range(0, place.size - 1, 2):
        group: Any = dist.new_group([first, first + 1])
        if place.rank in (first, first + 1):
            tensor = place.full(5, place.rank)
            dist.all_reduce(tensor, group=group)
            right = right and _is(tensor, 2 * first + 1)
    flag = torch.ones(())
    world: Any = dist.new_group(backend="gloo")
    dist.all_reduce(flag, group=world)
    return right and flag.item() == place.size


def _barrier(place: GroupMember) -> bool:
    dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)
    return True


COLLECTIVES: Mapping[str, Callable[[GroupMember], bool]] = MappingProxyType(
    {
        "all-reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce-scatter": _reduce_scatter,
        "all-gather": _all_gather,
        "all-to-all": _all_to_all,
        "send and receive": lambda place: _exchange(place, 1),
        "both directions": lambda place: _exchange(place, 1, -1),
        "objects": _objects,
        "groups": _groups,
        "barrier": _barrier,
    }
)
"""Name -> test that returns True if the answer is correct."""


def _is(tensor: Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())
