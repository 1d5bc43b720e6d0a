"""Sum of a flat gradient buffer over the replicas: at once, into shards, or in two levels.

With n ranks in nodes of k, the flat sum sends every element over the slow links between nodes about
2 (n - 1) / n times a rank; in two levels each rank sends only its k-th of the buffer across
(Horovod's hierarchical all-reduce)::

    inside a node    reduce-scatter       rank i holds the node's sum of part i
    between nodes    all-reduce of part i over the ranks i of all nodes
    inside a node    all-gather           left out when the optimizer only wants part i

Reduce-scatter and all-gather work in place: rank r of n owns the buffer's r-th n-th. gloo has
neither as a collective of its own: it sums the whole buffer and throws most of it away, and gathers
through copies, so that the two together take three times as long as an all-reduce. There the ranks
send each other their parts directly. That also adds up every element in one place only, in the
order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.parameters.records import Sum
from lightning_ptdp.shims.torch import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.mesh import Group

__all__ = ["BucketEntry", "Pending", "Reduction"]

_BUCKET = 25 * 2**20
"""Enough for the bandwidth of a few ranks, and small enough to start early (arXiv 2006.15704;
torch's default)."""
_PART = 4 * 2**20
"""A million elements in float32: Megatron-core's buckets have as many for each replica
(``DistributedDataParallelConfig.bucket_size``)."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum over ``inner`` x ``outer``.

    Attributes:
        inner: Ranks that are close to each other: all of them, if there is one level.
        outer: The ranks with this rank's place in the other nodes; one rank if there is one level.
        scatter: Leave each rank with the sum of its own part only.
        dtype: What is sent; None: the buffer's own.
        outer_dtype: What is sent between nodes; None: ``dtype``.
    """

    inner: Group = field(default_factory=Group)
    outer: Group = field(default_factory=Group)
    scatter: bool = False
    dtype: torch.dtype | None = None
    outer_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Ranks that are summed over."""
        return self.inner.size * self.outer.size

    @property
    def parts(self) -> int:
        """Into how many equal parts a buffer has to be divisible."""
        return self.inner.size if self._splits else 1

    @property
    def bucket_bytes(self) -> int:
        """Return the least size of a buffer in bytes.

        A ring sends it in ``size`` parts one after the other, and parts that take less time than a
        message's latency would leave the link idle."""
        return max(_BUCKET, _PART * self.size)

    @property
    def counts(self) -> bool:
        """Return True if this rank is the first of those that hold the same values after the
        reduction."""
        return self.outer.rank == 0 and (self.scatter or self.inner.rank == 0)

    @property
    def _splits(self) -> bool:
        return self.inner.size > 1 and (self.scatter or self.outer.size > 1)

    def mine(self, buffer: Tensor) -> Tensor:
        """The view of ``buffer`` that holds the sum afterwards: this rank's part of it, or all."""
        return _own_part(buffer, self.inner) if self.scatter else buffer

    def prepare(self, buffer: Tensor) -> Pending:
        """Sums ``buffer`` in place when it is begun; all ranks must begin the same buffers in the
        same order."""
        return Pending(self._steps(buffer))

    def start_gather(self, buffer: Tensor) -> Pending:
        """Fill the parts of ``buffer`` that ``mine`` leaves out from the ranks that own them."""
        gathers = (
            [start_all_gather(buffer, self.inner)] if self.scatter and self.inner.size > 1 else []
        )
        pending = Pending(iter(gathers))
        pending.begin()
        return pending

    def _steps(self, buffer: Tensor) -> Iterator[Work]:
        """One collective after the other; each has to be waited for before the next one is asked
        for."""
        sent = buffer if self.dtype is None else buffer.to(self.dtype)
        part = _own_part(sent, self.inner) if self._splits else sent
        if self._splits:
            yield start_reduce_scatter(sent, self.inner)
        elif self.inner.size > 1:
            yield _all_reduce(sent, self.inner)
        if self.outer.size > 1:
            across = part if self.outer_dtype is None else part.to(self.outer_dtype)
            yield _all_reduce(across, self.outer)
            if across is not part:
                part.copy_(across)
        if self._splits and not self.scatter:
            yield start_all_gather(sent, self.inner)
        if sent is not buffer:
            self.mine(buffer).copy_(self.mine(sent))


@dataclass(frozen=True)
class BucketEntry:
    """A parameter and where its gradient has to go.

    Attributes:
        parameter: Local (possibly sharded) parameter.
        chunk: Pipeline stage whose backward completes the gradient; None if several stages
            contribute.
        reduction: How it is summed over the ranks that read something else.
        sums: What is to be summed over others then.
        tied: Whether those are at other stages, where its neighbours in a buffer would be others.
    """

    parameter: nn.Parameter
    chunk: int | None = None
    reduction: Reduction = field(default_factory=Reduction)
    sums: tuple[Sum, ...] = ()
    tied: bool = False


def _all_reduce(buffer: Tensor, group: Group) -> Work:
    work: Work | None = dist.all_reduce(buffer, group=group.handle, async_op=True)
    assert work is not None
    return work


class Pending:
    """A chain of collectives, at most one of which is under way.

    Attributes:
        is_done: The last one is.
    """

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._begun = self.is_done = False
        self._told: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start the first collective, unless that has been done."""
        if not self._begun:
            self._begun = True
            self._next()

    def advance(self) -> None:
        """Wait for the collective under way and start the one after it, if any."""
        if self._work is not None:
            self._work.wait()
            self._next()

    def wait(self) -> None:
        """Return when the last one is done."""
        self.begin()
        while not self.is_done:
            self.advance()

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` behind the last one: who waits for it does (on CUDA: while the stream that
        has waited for it is the current one, so that an event that is recorded then happens in the
        order of the reductions, and holds nobody up)."""
        self._told.append(tell)

    def _next(self) -> None:
        self._work = next(self._steps, None)
        if self._work is None:
            self.is_done = True
            for tell in self._told:
                tell()


class Work(Protocol):
    """Handle of a collective: torch's, or one with the same methods."""

    def wait(self) -> object:
        """Return when the result is there (on CUDA: when the stream waits for it)."""


def _own_part(buffer: Tensor, group: Group) -> Tensor:
    """The view of ``buffer`` (n elements, n divisible by the group's size) that this rank owns."""
    return _parts(buffer, group)[group.rank]


def start_reduce_scatter(buffer: Tensor, group: Group) -> Work:
    """Sum ``buffer`` over the group; only the own part holds the sum afterwards, the rest is
    undefined."""
    if _is_gloo(group):
        parts = _parts(buffer, group)
        received = torch.empty_like(buffer).split(parts[0].numel())
        return _Direct(
            group, parts, received, partial(_add_in_order, parts[group.rank], received, group.rank)
        )
    work: Work = reduce_scatter_single(
        _own_part(buffer, group), buffer, group.handle, async_op=True
    )
    return work


def start_all_gather(buffer: Tensor, group: Group) -> Work:
    """Fill the other ranks' parts of ``buffer`` from their own ones."""
    if _is_gloo(group):
        parts = _parts(buffer, group)
        return _Direct(group, [parts[group.rank]] * group.size, parts)
    work: Work = all_gather_single(buffer, _own_part(buffer, group), group.handle, async_op=True)
    return work


def _is_gloo(group: Group) -> bool:
    return bool(dist.get_backend(group.handle) == "gloo")


def _parts(buffer: Tensor, group: Group) -> Sequence[Tensor]:
    assert buffer.numel() % group.size == 0, (buffer.numel(), group.size)
    return buffer.split(buffer.numel() // group.size)


class _Direct:
    """Messages between all pairs, each rank starting with its right neighbour so that no one is
    asked by all at once.

    Args:
        group: The ranks.
        sent: What each of them is sent; torch does not keep it alive.
        received: Where what each of them sends goes.
        settle: What is left to do then.
    """

    def __init__(
        self,
        group: Group,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._kept, self._settle = sent, settle
        self._pending: list[Work | None] = []
        for step in range(1, group.size):
            target, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            self._pending.append(
                dist.irecv(received[source], group.ranks[source], group=group.handle)
            )
            self._pending.append(dist.isend(sent[target], group.ranks[target], group=group.handle))

    def wait(self) -> None:
        """Return when all messages are there, and what was sent has left."""
        for work in self._pending:
            assert work is not None
            work.wait()
        if self._settle is not None:
            self._settle()


def _add_in_order(mine: Tensor, received: Sequence[Tensor], rank: int) -> None:
    """Add up in the order of the ranks, so that a part does not depend on who owns it."""
    first, *others = (mine if index == rank else term for index, term in enumerate(received))
    for term in others:
        first.add_(term)
    if rank:
        mine.copy_(first)
