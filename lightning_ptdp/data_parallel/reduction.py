"""Sum of a flat gradient buffer over the replicas, with one or two levels and shards.

With n ranks in nodes of k, a flat sum sends every element over the slow links between nodes about 2
(n - 1) / n times per rank. With two levels each rank sends only its k-th of the buffer across nodes
(Horovod's hierarchical all-reduce)::

    inside a node    reduce-scatter       rank i holds the node's sum of part i
    between nodes    all-reduce of part i over the ranks i of all nodes
    inside a node    all-gather           left out when the optimizer only wants part i

Reduce-scatter and all-gather work in place: rank r of n owns the r-th n-th of the buffer.

gloo has no native reduce-scatter or all-gather. It sums the whole buffer and discards most of it,
and it gathers through copies, so that both together take three times as long as an all-reduce. On
gloo the ranks therefore send each other their parts directly. This also sums every element in one
place only, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.shims.torch_distributed import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.mesh import Group

_BUCKET = 25 * 2**20
"""Enough for the bandwidth of a few ranks, and small enough to start early.

arXiv 2006.15704; torch's default.
"""
_PART = 4 * 2**20
"""A million elements in float32, per rank of the sum.

Megatron-core's buckets have as many for each replica
(``DistributedDataParallelConfig.bucket_size``).
"""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum over ``inner`` x ``outer``.

    Attributes:
        inner: Ranks of one node; all ranks, if there is one level.
        outer: Ranks with the same position in the other nodes; one rank if there is one level.
        scatter: Leave each rank with the sum of only its own part.
        dtype: Dtype of the communication; None: the buffer's own.
        outer_dtype: Dtype of the communication between nodes; None: ``dtype``.
    """

    inner: Group = field(default_factory=Group)
    outer: Group = field(default_factory=Group)
    scatter: bool = False
    dtype: torch.dtype | None = None
    outer_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks in the sum."""
        return self.inner.size * self.outer.size

    @property
    def parts(self) -> int:
        """Return the number of equal parts into which a buffer must be divisible."""
        return self.inner.size if self._splits else 1

    @property
    def bucket_bytes(self) -> int:
        """Return the default size of a buffer in bytes.

        A ring sends a buffer in ``size`` parts, one after the other. Parts that take less time than
        a message's latency would leave the link idle.
        """
        return max(_BUCKET, _PART * self.size)

    @property
    def counts(self) -> bool:
        """Return True if this rank is the first that holds its values after the reduction."""
        return self.outer.rank == 0 and (self.scatter or self.inner.rank == 0)

    @property
    def _splits(self) -> bool:
        return self.inner.size > 1 and (self.scatter or self.outer.size > 1)

    def mine(self, buffer: Tensor) -> Tensor:
        """Return the view of ``buffer`` that holds the sum: this rank's part of it, or all."""
        return _own_part(buffer, self.inner) if self.scatter else buffer

    def prepare(self, buffer: Tensor) -> PendingReduction:
        """Return a ``PendingReduction`` that sums ``buffer`` in place when it begins.

        All ranks must begin the same buffers in the same order.
        """
        return PendingReduction(self._steps(buffer))

    def start_gather(self, buffer: Tensor) -> PendingReduction:
        """Start to gather the parts of ``buffer`` outside of ``mine`` from their owners."""
        gathers = (
            [start_all_gather(buffer, self.inner)] if self.scatter and self.inner.size > 1 else []
        )
        pending = PendingReduction(iter(gathers))
        pending.begin()
        return pending

    def _steps(self, buffer: Tensor) -> Iterator[Work]:
        """Start one collective after the other.

        Each must be waited for before the next one is requested.
        """
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


def _all_reduce(buffer: Tensor, group: Group) -> Work:
    work = dist.all_reduce(buffer, group=group.handle, async_op=True)
    assert work is not None
    return work


class PendingReduction:
    """A chain of collectives, at most one of which is in progress.

    Attributes:
        is_done: True if the last collective is done.
    """

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._begun = self.is_done = False
        self._callbacks: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start the first collective, unless it has been started."""
        if not self._begun:
            self._begun = True
            self._next()

    def advance(self) -> None:
        """Wait for the current collective and start the next one, if any."""
        if self._work is not None:
            self._work.wait()
            self._next()

    def wait(self) -> None:
        """Return when the last collective is done."""
        self.begin()
        while not self.is_done:
            self.advance()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Register ``callback``, to be called after the last collective.

        The thread that waits for the collective calls it. On CUDA the current stream is then the
        one that has waited for the collective. An event that ``callback`` records therefore follows
        the order of the reductions and delays no other stream.
        """
        self._callbacks.append(callback)

    def _next(self) -> None:
        self._work = next(self._steps, None)
        if self._work is None:
            self.is_done = True
            for callback in self._callbacks:
                callback()


def _own_part(buffer: Tensor, group: Group) -> Tensor:
    """Return this rank's part of ``buffer`` as a view; n must divide by the group's size."""
    return _parts(buffer, group)[group.rank]


def start_reduce_scatter(buffer: Tensor, group: Group) -> Work:
    """Sum ``buffer`` over the group into this rank's own part.

    The other parts are undefined afterwards.
    """
    if _is_gloo(group):
        parts = _parts(buffer, group)
        received = torch.empty_like(buffer).split(parts[0].numel())
        return _Direct(
            group, parts, received, partial(_add_in_order, parts[group.rank], received, group.rank)
        )
    return reduce_scatter_single(_own_part(buffer, group), buffer, group.handle, async_op=True)


def start_all_gather(buffer: Tensor, group: Group) -> Work:
    """Fill the other ranks' parts of ``buffer`` with the values of their owners."""
    if _is_gloo(group):
        parts = _parts(buffer, group)
        return _Direct(group, [parts[group.rank]] * group.size, parts)
    return all_gather_single(buffer, _own_part(buffer, group), group.handle, async_op=True)


def _is_gloo(group: Group) -> bool:
    return bool(dist.get_backend(group.handle) == "gloo")


def _parts(buffer: Tensor, group: Group) -> Sequence[Tensor]:
    assert buffer.numel() % group.size == 0, (buffer.numel(), group.size)
    return buffer.split(buffer.numel() // group.size)


class _Direct:
    """Direct messages between all pairs of ranks.

    Each rank starts with its right neighbour, so that no rank is the target of all others at once.

    Args:
        group: The ranks.
        sent: Tensor for each rank; kept here, because torch does not keep it alive.
        received: Buffer for each rank's message.
        settle: Called after all messages.
    """

    def __init__(
        self,
        group: Group,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._kept = sent
        self._settle = settle
        self._pending: list[dist.Work | None] = []
        for step in range(1, group.size):
            target = (group.rank + step) % group.size
            source = (group.rank - step) % group.size
            self._pending.append(
                dist.irecv(received[source], group.ranks[source], group=group.handle)
            )
            self._pending.append(dist.isend(sent[target], group.ranks[target], group=group.handle))

    def wait(self) -> None:
        """Return when all messages have been received and sent."""
        for work in self._pending:
            assert work is not None
            work.wait()
        if self._settle is not None:
            self._settle()


def _add_in_order(part: Tensor, received: Sequence[Tensor], rank: int) -> None:
    """Add the terms in the order of the ranks, independently of the part's owner."""
    first, *terms = (part if index == rank else term for index, term in enumerate(received))
    for term in terms:
        first.add_(term)
    if rank:
        part.copy_(first)


Work = dist.Work | _Direct
"""Handle of a collective."""
