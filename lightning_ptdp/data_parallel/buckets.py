"""Flat gradient buckets, reduced while the backward still runs.

Parameters are laid into contiguous buffers in backward order, one set a pipeline chunk; a parameter's gradient is a view of its
buffer. When the last microbatch of a chunk runs backward the chunk is *armed*: a bucket's all-reduce starts as soon as its last
gradient has been accumulated (arXiv 2006.15704, section 3.2.3, with the trigger moved from the step to the chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.data_parallel.copied import Copied, sum_copies
from lightning_ptdp.mesh import Group

__all__ = ["BucketEntry", "GradientBuckets"]

_ALIGNMENT = 32  # elements; keeps every view on a 128-byte boundary for float32


@dataclass(frozen=True)
class BucketEntry:
    """A parameter and where its gradient has to go.

    Attributes:
        parameter: Local (possibly sharded) parameter.
        chunk: Pipeline stage whose backward completes the gradient; None if several stages contribute.
        sums: Further group over which the gradient is a partial sum: the tensor group under sequence parallelism. Its ranks hold
            the same parameters in the same order.
        shared: Ranks at other stages that hold the same parameter (tied weights) and other ones besides.
        copied: Parts of it that some ranks of the tensor group hold alike, each with a partial sum of the gradient.
    """

    parameter: nn.Parameter
    chunk: int | None = None
    sums: Group | None = None
    shared: Group | None = None
    copied: tuple[Copied, ...] = ()


@dataclass(eq=False)
class _Bucket:
    """One contiguous buffer."""

    entries: list[BucketEntry]
    buffer: Tensor
    views: list[Tensor]
    pending: int = 0
    launched: bool = False
    work: Any = None


@dataclass(eq=False)
class GradientBuckets:
    """All gradients of one rank.

    Args:
        entries: Parameters in forward order; the order of shared ones must be the same on all ranks that share them.
        group: Ranks over which gradients are summed (data x context).
        bucket_bytes: Largest size of a buffer, except for a single larger parameter.
        launched: Is told of every reduction that starts: its chunk and what waits for it.
    """

    entries: Sequence[BucketEntry]
    group: Group
    bucket_bytes: int = 25 * 2**20
    launched: Callable[[int | None, Any], None] | None = None
    _buckets: dict[int | None, list[_Bucket]] = field(default_factory=dict)
    _armed: set[int | None] = field(default_factory=set)
    _home: dict[int, tuple[int | None, _Bucket]] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _stash: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for chunk in dict.fromkeys(entry.chunk for entry in self.entries):
            mine = [entry for entry in reversed(self.entries) if entry.chunk == chunk]
            self._buckets[chunk] = [self._allocate(part) for part in _cut(mine, self.bucket_bytes)]
        for bucket in self._all():
            for entry in bucket.entries:
                self._home[id(entry.parameter)] = entry.chunk, bucket
                self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(self.complete))

    def install(self) -> None:
        """Make every parameter's ``.grad`` its view of a buffer."""
        for bucket in self._all():
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                entry.parameter.grad = view

    def park(self) -> None:
        """Take the gradients off the parameters, so that ``zero_grad`` cannot touch them; the buffers keep them."""
        for entry in self.entries:
            entry.parameter.grad = None

    def zero(self) -> None:
        """Set all gradients to zero."""
        self._stash = []
        for bucket in self._all():
            bucket.buffer.zero_()

    def arm(self, chunk: int | None, awaited: Iterable[Tensor] | None = None) -> None:
        """The next backward of ``chunk`` completes its gradients: start each bucket's reduction when it is full.

        Args:
            chunk: The stage.
            awaited: The parameters whose gradients are still to come, each told by ``complete``; by default all of them, each
                told by autograd.
        """
        self._armed.add(chunk)
        wanted = None if awaited is None else {id(parameter) for parameter in awaited}
        for bucket in self._buckets.get(chunk, ()):
            bucket.launched = False
            bucket.pending = sum(wanted is None or id(entry.parameter) in wanted for entry in bucket.entries)
        self._launch_full(chunk)

    def complete(self, parameter: Tensor) -> None:
        """The gradient of ``parameter``, one of the ``awaited``, is complete."""
        chunk, bucket = self._home[id(parameter)]
        if chunk in self._armed:
            bucket.pending -= 1
            self._launch_full(chunk)

    def reduce(self, chunk: int | None) -> None:
        """Start what ``arm`` left over: buckets with parameters that the backward did not use."""
        if chunk not in self._armed:
            self.arm(chunk)
        for bucket in self._buckets.get(chunk, ()):
            self._launch(bucket)
        self._armed.discard(chunk)

    def reduce_all(self) -> None:
        """Start the reductions of all chunks, for gradients that were complete before; ``finish`` does those without a chunk."""
        for chunk in self._buckets:
            if chunk is not None:
                self.reduce(chunk)

    def finish(self, scale: Tensor | float | None = None) -> None:
        """Wait for the reductions, add up what other groups hold, and scale.

        Every chunk's ``reduce`` must have been called; that of the parameters without a chunk is started here.
        """
        self.reduce(None)
        for bucket in self._all():
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        for bucket in self._all():
            group = bucket.entries[0].sums
            if group is not None:
                dist.all_reduce(bucket.buffer, group=group.handle)
        sum_copies((v, e.copied) for bucket in self._all() for e, v in zip(bucket.entries, bucket.views, strict=True))
        self._sum_shared()
        if scale is not None:
            for bucket in self._all():
                bucket.buffer.mul_(scale)

    def _sum_shared(self) -> None:
        """Add up tied gradients, one message each: the stages lay out their buckets differently, but agree on this order."""
        views = {id(e): v for bucket in self._all() for e, v in zip(bucket.entries, bucket.views, strict=True)}
        for entry in self.entries:
            if entry.shared is not None:
                dist.all_reduce(views[id(entry)], group=entry.shared.handle)

    def stash(self, scale: float) -> None:
        """Move ``scale`` times the gradients aside, so that the next batch of an accumulation can be scaled on its own."""
        if not self._stash:
            self._stash = [torch.zeros_like(buffer) for buffer in self.buffers()]
        for kept, buffer in zip(self._stash, self.buffers(), strict=True):
            kept.add_(buffer, alpha=scale)
            buffer.zero_()

    def unstash(self, scale: float) -> None:
        """``scale`` times the gradients plus what was moved aside."""
        for kept, buffer in zip(self._stash, self.buffers(), strict=True):
            buffer.mul_(scale).add_(kept)
        self._stash = []

    @property
    def has_stash(self) -> bool:
        """Whether gradients have been moved aside."""
        return bool(self._stash)

    def buffers(self) -> Iterator[Tensor]:
        """The flat buffers."""
        for bucket in self._all():
            yield bucket.buffer

    def close(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.park()

    def _all(self) -> Iterator[_Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def _allocate(self, entries: list[BucketEntry]) -> _Bucket:
        offsets, total = [], 0
        for entry in entries:
            offsets.append(total)
            total += -(-entry.parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        first = entries[0].parameter
        buffer = torch.zeros(total, dtype=first.dtype, device=first.device)
        views = [
            buffer[offset : offset + e.parameter.numel()].view_as(e.parameter) for offset, e in zip(offsets, entries, strict=True)
        ]
        return _Bucket(entries, buffer, views)

    def _launch_full(self, chunk: int | None) -> None:
        """Collectives must start in the same order on all replicas, whatever order their gradients arrive in."""
        for bucket in self._buckets.get(chunk, ()):
            if bucket.pending > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        if bucket.launched:
            return
        bucket.launched = True
        if self.group.size > 1:
            bucket.work = dist.all_reduce(bucket.buffer, group=self.group.handle, async_op=True)
            if self.launched is not None:
                self.launched(bucket.entries[0].chunk, bucket.work)


def _cut(entries: Sequence[BucketEntry], limit: int) -> Iterator[list[BucketEntry]]:
    """Runs of entries that may share a buffer: same dtype, device and further sums, at most ``limit`` bytes."""
    kinds: dict[tuple[Any, ...], list[BucketEntry]] = {}
    for entry in entries:
        kind = (entry.parameter.dtype, entry.parameter.device, entry.sums.ranks if entry.sums else ())
        kinds.setdefault(kind, []).append(entry)
    for same in kinds.values():
        run: list[BucketEntry] = []
        size = 0
        for entry in same:
            nbytes = entry.parameter.numel() * entry.parameter.element_size()
            if run and size + nbytes > limit:
                yield run
                run, size = [], 0
            run.append(entry)
            size += nbytes
        yield run
