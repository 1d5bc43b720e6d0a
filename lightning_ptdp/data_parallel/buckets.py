"""Flat gradient buckets, reduced while the backward still runs.

Parameters are laid into contiguous buffers in backward order, one set a pipeline chunk; a
parameter's gradient is a view of its buffer. When the last microbatch of a chunk runs backward the
chunk is *armed*: a bucket's reduction starts as soon as its last gradient has been accumulated
(arXiv 2006.15704, section 3.2.3, with the trigger moved from the step to the chunk). With a sharded
optimizer a reduction leaves each rank with the sum of its part of every buffer, whatever parameters
the cuts go through."""

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
from lightning_ptdp.data_parallel.overlapped_reduction import Beside
from lightning_ptdp.data_parallel.reduction import BucketEntry
from lightning_ptdp.shims.torch import set_gradient_dtype
from lightning_ptdp.world.mesh import Group

__all__ = ["GradientBuckets"]


@dataclass(eq=False)
class GradientBuckets:
    """All gradients of one rank.

    Args:
        entries: Parameters in forward order, which on all ranks that sum some of them must be the
            same.
        scatters: Whether ranks are left with the sum of a part of the gradients only, of whichever
            entries.
        bucket_bytes: Largest size of a buffer, except for a single larger parameter; None: as its
            reduction would have it.
        widen: Keep gradients of parameters in half precision in float32.
        launched: Is told of every reduction that starts: its chunk and what waits for it.
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
    _beside: Beside | None = None
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
                # Of the node, not of the parameter: a backward calls it also where a product has
                # added to the gradient by itself.
                node = get_gradient_edge(entry.parameter).node
                self._hooks.append((node, node.register_hook(partial(self._ran, entry.parameter))))

    def install(self) -> None:
        """Make every parameter's ``.grad`` its view of a buffer."""
        for bucket in self.buckets():
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                entry.parameter.grad = view

    def resume(self) -> None:
        """Go on adding to the gradients that the parameters have; one that somebody took off its
        parameter begins at zero."""
        for bucket in self.buckets():
            for entry, view in zip(bucket.entries, bucket.views, strict=True):
                gradient = entry.parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient is not view:
                    view.copy_(gradient)
                entry.parameter.grad = view

    def park(self) -> None:
        """Take the gradients off the parameters, so that ``zero_grad`` cannot touch them; the
        buffers keep them."""
        for entry in self.entries:
            entry.parameter.grad = None

    def zero(self) -> None:
        """Set all gradients to zero."""
        self._stash = []
        for bucket in self.buckets():
            bucket.buffer.zero_()

    def arm(self, chunk: int | None, awaited: Iterable[Tensor] | None = None) -> None:
        """The next backward of ``chunk`` completes its gradients: start each bucket's reduction
        when it is full.

        Args:
            chunk: The stage.
            awaited: The parameters whose gradients are still to come, each told by ``complete``; by
                default all of them, each told by autograd.
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
        """The gradient of ``parameter``, one of the ``awaited``, is complete."""
        self._arrived.add(id(parameter))
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

    def finish(self, scale: Tensor | float | None = None) -> None:
        """Start the reductions that have not been, wait for all, add up what other groups hold, and
        scale."""
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
        """Parameters whose gradient no backward has added to, tied ones left out: another stage may
        have used those."""
        return [
            entry.parameter
            for entry in self.entries
            if id(entry.parameter) not in self._arrived and not entry.tied
        ]

    def _parts_to_sum(self) -> Iterator[tuple[Tensor, Group]]:
        """In the order of the entries: the stages lay out their buckets differently, but agree on
        this one."""
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
        """Move ``scale`` times the gradients aside, so that the next batch of an accumulation can
        be scaled on its own."""
        if not self._stash:
            self._stash = [torch.zeros_like(bucket.buffer) for bucket in self.buckets()]
        for kept, bucket in zip(self._stash, self.buckets(), strict=True):
            kept.add_(bucket.buffer, alpha=scale)
            bucket.buffer.zero_()

    def unstash(self, scale: float) -> None:
        """``scale`` times the gradients plus what was moved aside."""
        for kept, bucket in zip(self._stash, self.buckets(), strict=True):
            bucket.buffer.mul_(scale).add_(kept)
        self._stash = []

    @property
    def has_stash(self) -> bool:
        """Return True if gradients have been moved aside."""
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
        """The same elements in few flat tensors: neighbours in a buffer are one, with the zeros
        between them."""
        return joined(gradients, ((bucket.buffer, bucket.next_begins) for bucket in self.buckets()))

    def buckets(self) -> Iterator[Bucket]:
        """All buckets, in backward order within each chunk."""
        return chain.from_iterable(self._buckets.values())

    def _cut(self, entries: Sequence[BucketEntry]) -> Iterator[list[BucketEntry]]:
        """Runs of entries that may share a buffer: same dtype, device and reduction, and no larger
        than a bucket.

        A tied parameter whose sum is scattered has a buffer of its own, which then is the same on
        all stages that hold it."""
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
        """Collectives must start in the same order on all replicas, whatever order their gradients
        arrive in."""
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
            self._beside = Beside(bucket.buffer.device)
        pending = bucket.reduction.prepare(bucket.buffer)
        if self.launched is not None:
            self.launched(bucket.entries[0].chunk, pending)
        self._beside.launch(pending, shares=bucket.reduction.outer.size == 1)
