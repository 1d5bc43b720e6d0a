"""Flat gradient buckets, reduced during the backward pass.

Parameters are assigned to contiguous buffers in backward order, one set of buffers per pipeline
chunk. A parameter's gradient is a view of its buffer. A chunk is *armed* before its last microbatch
runs backward. A bucket's reduction then starts as soon as its last gradient has been accumulated
(arXiv 2006.15704, section 3.2.3, with the trigger moved from the step to the chunk).

With a sharded optimizer, a reduction leaves each rank with the sum of its part of every buffer. The
parts may cut through parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_ptdp.data_parallel.bucket import ALIGNMENT, HALF, Bucket, aligned
from lightning_ptdp.data_parallel.flat_shards import Shard
from lightning_ptdp.data_parallel.gradient_sums import add_up, joined
from lightning_ptdp.data_parallel.overlapped_reduction import OverlappedReduction
from lightning_ptdp.data_parallel.reduction import BucketEntry
from lightning_ptdp.shims.torch import set_gradient_dtype
from lightning_ptdp.world.mesh import Group

__all__ = ["GradientBuckets"]


@dataclass(eq=False)
class GradientBuckets:
    """All gradients of one rank.

    Args:
        entries: Parameters in forward order. The order must be the same on all ranks that sum some
            of them.
        scatters: True if the reduction of any entry leaves each rank with the sum of only a part of
            the gradients.
        bucket_bytes: Largest size of a buffer, except for a single larger parameter; None: the
            default of its reduction.
        widen: Keep gradients of half-precision parameters in float32.
        launched: Called for every reduction that starts, with its chunk and its ``Pending``.
    """

    entries: Sequence[BucketEntry]
    scatters: bool = False
    bucket_bytes: int | None = None
    widen: bool = True
    launched: Callable[[int | None, Any], None] | None = None
    _buckets: dict[int | None, list[Bucket]] = field(default_factory=dict)
    _armed: set[int | None] = field(default_factory=set)
    _home: dict[int, tuple[int | None, Bucket]] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _stash: list[Tensor] = field(default_factory=list)
    _arrived: set[int] = field(default_factory=set)
    _beside: OverlappedReduction | None = None
    _sums: list[tuple[Tensor, Group]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for chunk in dict.fromkeys(entry.chunk for entry in self.entries):
            mine = [entry for entry in reversed(self.entries) if entry.chunk == chunk]
            self._buckets[chunk] = [self._allocate(part) for part in self._cut(mine)]
        self._sums = list(self._parts_to_sum())
        for bucket in self.buckets():
            for entry in bucket.entries:
                self._home[id(entry.parameter)] = entry.chunk, bucket
                set_gradient_dtype(entry.parameter, bucket.buffer.dtype)
                # A hook of the graph node, not of the parameter: the backward also calls it if a
                # product has accumulated into the gradient directly.
                node = get_gradient_edge(entry.parameter).node
                self._hooks.append((node, node.register_hook(partial(self._ran, entry.parameter))))

    def install(self) -> None:
        """Make every parameter's ``.grad`` its view of a buffer."""
        for bucket in self.buckets():
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                entry.parameter.grad = view

    def resume(self) -> None:
        """Continue to accumulate into the current gradients of the parameters.

        If a parameter's gradient was removed, it restarts at zero.
        """
        for bucket in self.buckets():
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                gradient = entry.parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient is not view:
                    view.copy_(gradient)
                entry.parameter.grad = view

    def park(self) -> None:
        """Remove the gradients from the parameters; the buffers keep them.

        ``zero_grad`` then cannot clear them.
        """
        for entry in self.entries:
            entry.parameter.grad = None

    def zero(self) -> None:
        """Set all gradients to zero."""
        self._stash = []
        for bucket in self.buckets():
            bucket.buffer.zero_()

    def arm(self, chunk: int | None, awaited: Iterable[Tensor] | None = None) -> None:
        """Declare that the next backward of ``chunk`` completes its gradients.

        Each bucket's reduction then starts when the bucket is full.

        Args:
            chunk: The stage.
            awaited: Parameters with an incomplete gradient, each completed by a call of
                ``complete``; by default all of them, each completed by autograd.
        """
        self._armed.add(chunk)
        wanted = None if awaited is None else {id(parameter) for parameter in awaited}
        for bucket in self._buckets.get(chunk, ()):
            bucket.launched = False
            bucket.pending = sum(
                wanted is None or id(entry.parameter) in wanted for entry in bucket.entries
            )
        self._launch_full(chunk)

    def complete(self, parameter: Tensor) -> None:
        """Record that the gradient of ``parameter``, one of the ``awaited``, is complete."""
        self._arrived.add(id(parameter))
        chunk, bucket = self._home[id(parameter)]
        if chunk in self._armed:
            bucket.pending -= 1
            self._launch_full(chunk)

    def reduce(self, chunk: int | None) -> None:
        """Start the remaining reductions of a chunk, after its last backward.

        These are buckets with parameters that the backward did not use.
        """
        if chunk not in self._armed:
            self.arm(chunk)
        for bucket in self._buckets.get(chunk, ()):
            self._launch(bucket)
        self._armed.discard(chunk)

    def finish(self, scale: Tensor | float | None = None) -> None:
        """Complete all reductions and the sums over other groups, then scale.

        Starts the reductions that have not started yet.
        """
        for chunk, buckets in self._buckets.items():
            if not all(bucket.launched for bucket in buckets):
                self.reduce(chunk)
        self._armed.clear()
        for bucket in self.buckets():
            bucket.launched = False
        if self._beside is not None:
            self._beside.join()
        add_up(self._sums)
        if scale is not None:
            for bucket in self.buckets():
                bucket.mine().mul_(scale)

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters to which no backward has given a gradient.

        Tied parameters are left out, because another stage may have used them.
        """
        return [
            entry.parameter
            for entry in self.entries
            if id(entry.parameter) not in self._arrived and not entry.tied
        ]

    def _parts_to_sum(self) -> Iterator[tuple[Tensor, Group]]:
        """Yield the parts that other groups sum, in the order of the entries.

        The stages lay out their buckets differently, but agree on this order.
        """
        mine: dict[int, list[tuple[Shard, Tensor]]] = {}
        for bucket in self.buckets():
            for entry, shard in bucket.own_shards():
                mine.setdefault(id(entry), []).append((shard, shard.within(bucket.buffer)))
        for entry in self.entries:
            for where, group in entry.sums:
                for shard, flat in mine.get(id(entry), ()):
                    views = [view for _, view in shard.overlap(where, flat)] if where else [flat]
                    yield from ((view, group) for view in views)

    def stash(self, scale: float) -> None:
        """Move ``scale`` times the gradients to the stash.

        The next batch of an accumulation can then be scaled separately.
        """
        if not self._stash:
            self._stash = [torch.zeros_like(bucket.buffer) for bucket in self.buckets()]
        for kept, bucket in zip(self._stash, self.buckets(), strict=True):
            kept.add_(bucket.buffer, alpha=scale)
            bucket.buffer.zero_()

    def unstash(self, scale: float) -> None:
        """Multiply the gradients by ``scale`` and add the stash."""
        for kept, bucket in zip(self._stash, self.buckets(), strict=True):
            bucket.buffer.mul_(scale).add_(kept)
        self._stash = []

    @property
    def has_stash(self) -> bool:
        """Return True if the stash holds gradients."""
        return bool(self._stash)

    def close(self) -> None:
        """Detach from the parameters."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        self.park()
        for entry in self.entries:
            set_gradient_dtype(entry.parameter, entry.parameter.dtype)

    def local(self) -> Iterator[Tensor]:
        """Return this rank's gradients, in few tensors."""
        return (bucket.buffer for bucket in self.buckets())

    def joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return the same elements in few flat tensors.

        Neighbours in a buffer become one tensor, including the zeros between them.
        """
        return joined(gradients, ((bucket.buffer, bucket.next_begins) for bucket in self.buckets()))

    def buckets(self) -> Iterator[Bucket]:
        """Return all buckets, in backward order within each chunk."""
        return chain.from_iterable(self._buckets.values())

    def _cut(self, entries: Sequence[BucketEntry]) -> Iterator[list[BucketEntry]]:
        """Yield runs of entries that may share a buffer.

        They have the same dtype, device and reduction, and are no larger than a bucket. A tied
        parameter whose sum is scattered gets a buffer of its own, which is then the same on all
        stages that hold it.
        """
        kinds: dict[tuple[Any, ...], list[BucketEntry]] = {}
        for entry in entries:
            alone = id(entry) if entry.reduction.scatter and entry.tied else None
            kind = (entry.parameter.dtype, entry.parameter.device, entry.reduction, alone)
            kinds.setdefault(kind, []).append(entry)
        for same in kinds.values():
            limit = (
                same[0].reduction.bucket_bytes if self.bucket_bytes is None else self.bucket_bytes
            )
            run: list[BucketEntry] = []
            size = 0
            for entry in same:
                nbytes = entry.parameter.numel() * self._dtype(entry).itemsize
                if run and size + nbytes > limit:
                    yield run
                    run, size = [], 0
                run.append(entry)
                size += nbytes
            yield run

    def _dtype(self, entry: BucketEntry) -> torch.dtype:
        """Return the dtype of a parameter's gradient."""
        return (
            torch.float32 if self.widen and entry.parameter.dtype in HALF else entry.parameter.dtype
        )

    def _allocate(self, entries: list[BucketEntry]) -> Bucket:
        *offsets, total = accumulate((aligned(e.parameter.numel()) for e in entries), initial=0)
        multiple = ALIGNMENT * entries[0].reduction.parts
        dtype, device = self._dtype(entries[0]), entries[0].parameter.device
        buffer = torch.zeros(-(-total // multiple) * multiple, dtype=dtype, device=device)
        views = [
            buffer[offset : offset + e.parameter.numel()].view_as(e.parameter)
            for offset, e in zip(offsets, entries, strict=True)
        ]
        return Bucket(entries, offsets, buffer, views)

    def _ran(self, parameter: nn.Parameter, *_: object) -> None:
        self.complete(parameter)

    def _launch_full(self, chunk: int | None) -> None:
        """Start the reductions of full buckets, up to the first bucket that is not full.

        Collectives must start in the same order on all replicas, regardless of the order in which
        gradients are completed.
        """
        for bucket in self._buckets.get(chunk, ()):
            if bucket.pending > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if bucket.launched:
            return
        bucket.launched = True
        if bucket.reduction.size == 1:
            return
        if self._beside is None:
            self._beside = OverlappedReduction(bucket.buffer.device)
        pending = bucket.reduction.prepare(bucket.buffer)
        if self.launched is not None:
            self.launched(bucket.entries[0].chunk, pending)
        self._beside.launch(pending, shares=bucket.reduction.outer.size == 1)
