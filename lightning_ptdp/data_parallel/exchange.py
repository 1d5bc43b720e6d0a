"""Reduce-scatter and all-gather of a flat buffer in place: rank r of n owns its r-th n-th.

gloo has neither as a collective of its own: it sums the whole buffer and throws most of it away, and gathers through copies, so that
the two together take three times as long as an all-reduce. There the ranks send each other their parts directly. That also adds up
every element in one place only, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp._torch import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.mesh import Group

__all__ = ["Work", "own_part", "start_all_gather", "start_reduce_scatter"]


class Work(Protocol):
    """What waits for a collective: torch's handle, or what looks like one."""

    def wait(self) -> object:
        """Return when the result is there (on CUDA: when the stream waits for it)."""


def own_part(buffer: Tensor, group: Group) -> Tensor:
    """The view of ``buffer`` (n elements, n divisible by the group's size) that this rank owns."""
    return _parts(buffer, group)[group.rank]


def start_reduce_scatter(buffer: Tensor, group: Group) -> Work:
    """Sum ``buffer`` over the group; only ``own_part`` holds the sum afterwards, the rest is undefined."""
    if _is_gloo(group):
        parts = _parts(buffer, group)
        received = torch.empty_like(buffer).split(parts[0].numel())
        return _Direct(group, parts, received, partial(_add_in_order, parts[group.rank], received, group.rank))
    work: Work = reduce_scatter_single(own_part(buffer, group), buffer, group.handle, async_op=True)
    return work


def start_all_gather(buffer: Tensor, group: Group) -> Work:
    """Fill the other ranks' parts of ``buffer`` from their own ones."""
    if _is_gloo(group):
        parts = _parts(buffer, group)
        return _Direct(group, [parts[group.rank]] * group.size, parts)
    work: Work = all_gather_single(buffer, own_part(buffer, group), group.handle, async_op=True)
    return work


def _is_gloo(group: Group) -> bool:
    return bool(dist.get_backend(group.handle) == "gloo")


def _parts(buffer: Tensor, group: Group) -> Sequence[Tensor]:
    assert buffer.numel() % group.size == 0, (buffer.numel(), group.size)
    return buffer.split(buffer.numel() // group.size)


class _Direct:
    """Messages between all pairs, each rank starting with its right neighbour so that no one is asked by all at once.

    Args:
        group: The ranks.
        sent: What each of them is sent; torch does not keep it alive.
        received: Where what each of them sends goes.
        settle: What is left to do then.
    """

    def __init__(
        self, group: Group, sent: Sequence[Tensor], received: Sequence[Tensor], settle: Callable[[], None] | None = None
    ) -> None:
        self._kept, self._settle = sent, settle
        self._pending: list[Work | None] = []
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
            assert work is not None
            work.wait()
        if self._settle is not None:
            self._settle()
            self._settle = None
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Is done when somebody has waited."""
        return self._future


def _add_in_order(mine: Tensor, received: Sequence[Tensor], rank: int) -> None:
    """Add up in the order of the ranks, so that a part does not depend on who owns it."""
    first, *others = (mine if index == rank else term for index, term in enumerate(received))
    for term in others:
        first.add_(term)
    if rank:
        mine.copy_(first)
