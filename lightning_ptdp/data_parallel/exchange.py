"""Reduce-scatter and all-gather of a flat buffer in place: rank r of n owns its r-th n-th.

gloo has neither as a collective of its own: it sums the whole buffer and throws most of it away, and gathers through copies, so that
the two together take three times as long as an all-reduce. There the ranks send each other their parts directly. That also adds up
every element in one place only, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp._torch import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.mesh import Group

__all__ = ["Work", "own_part", "start_all_gather", "start_reduce_scatter"]


class Work(Protocol):
    """What waits for a collective: torch's handle, or what looks like one."""

    def wait(self) -> Any:
        """Return when the result is there (on CUDA: when the stream waits for it)."""


def own_part(buffer: Tensor, group: Group) -> Tensor:
    """The view of ``buffer`` (n elements, n divisible by the group's size) that this rank owns."""
    return _parts(buffer, group)[group.rank]


def start_reduce_scatter(buffer: Tensor, group: Group) -> Work:
    """Sum ``buffer`` over the group; only ``own_part`` holds the sum afterwards, the rest is undefined."""
    if _is_gloo(group):
        return _DirectReduceScatter(buffer, group)
    work: Work = reduce_scatter_single(own_part(buffer, group), buffer, group.handle, async_op=True)
    return work


def start_all_gather(buffer: Tensor, group: Group) -> Work:
    """Fill the other ranks' parts of ``buffer`` from their own ones."""
    if _is_gloo(group):
        return _DirectAllGather(buffer, group)
    work: Work = all_gather_single(buffer, own_part(buffer, group), group.handle, async_op=True)
    return work


def _is_gloo(group: Group) -> bool:
    return bool(dist.get_backend(group.handle) == "gloo")


def _parts(buffer: Tensor, group: Group) -> Sequence[Tensor]:
    assert buffer.numel() % group.size == 0, (buffer.numel(), group.size)
    return buffer.split(buffer.numel() // group.size)


class _Direct:
    """Messages between all pairs, each rank starting with its right neighbour so that no one is asked by all at once."""

    def __init__(self, group: Group, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self._pending: list[Any] = []
        self._kept = sent  # torch does not keep what is being sent alive
        self._future: torch.futures.Future[None] = torch.futures.Future()
        for step in range(1, group.size):
            target, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            self._pending.append(dist.irecv(received[source], group.ranks[source], group=group.handle))
            self._pending.append(dist.isend(sent[target], group.ranks[target], group=group.handle))

    def wait(self) -> None:
        """Return when all messages are there, and what was sent has left."""
        if self._future.done():
            return
        for work in self._pending:
            work.wait()
        self._settle()
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Is done when somebody has waited."""
        return self._future

    def _settle(self) -> None:
        """Nothing is left to do."""


class _DirectAllGather(_Direct):
    def __init__(self, buffer: Tensor, group: Group) -> None:
        parts = _parts(buffer, group)
        super().__init__(group, [parts[group.rank]] * group.size, parts)


class _DirectReduceScatter(_Direct):
    def __init__(self, buffer: Tensor, group: Group) -> None:
        parts = _parts(buffer, group)
        self._mine, self._rank = parts[group.rank], group.rank
        self._others = torch.empty_like(buffer).split(self._mine.numel())
        super().__init__(group, parts, self._others)

    def _settle(self) -> None:
        # In the order of the ranks, so that a part does not depend on who owns it.
        if self._rank:
            total = self._others[0]
            for rank in range(1, len(self._others)):
                total.add_(self._mine if rank == self._rank else self._others[rank])
            self._mine.copy_(total)
        else:
            for other in self._others[1:]:
                self._mine.add_(other)
        self._others = ()
