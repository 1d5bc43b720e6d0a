"""Flat gradient buckets, reduced during the backward pass.

Parameters are assigned to contiguous buffers in backward order, one set of buffers per pipeline
chunk. A parameter's gradient is a view of its buffer. Before the last microbatch of a chunk runs
backward, ``expect_last`` is called. A bucket's reduction then starts as soon as its last gradient
has been accumulated (arXiv 2006.15704, section 3.2.3, with the trigger moved from the step to the
chunk).

With a sharded optimizer, a reduction leaves each rank with the sum of its part of every buffer. The
parts may cut through parameters.

With sharded gradients (ZeRO-2, arXiv 1910.02054, section 5.2) a rank keeps only its part of the
sums. A gradient leaves its parameter as soon as it is complete, and a bucket's gradients are summed
and freed after every microbatch. Sums run while later buckets fill.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_ptdp.data_parallel.bucket import HALF, Bucket, GradientState, own_backward_refusal
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters, lay_out
from lightning_ptdp.data_parallel.gradient_sums import add_up, joined
from lightning_ptdp.data_parallel.overlapped_reduction import OverlappedReduction
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.shims.torch import set_gradient_dtype
from lightning_ptdp.world.mesh import Group

_MOST_WAITING = 64 * 2**20  # bytes of sharded gradients whose sums run at a time


@dataclass(eq=False)
class GradientBuckets:
    """A ``GradientStore`` of flat buffers that replicas sum.

    Args:
        parameters: Trained parameters in forward order. The order must be the same on all ranks
            that sum some of them.
        reductions: Sum over the ranks of each tuple of data axes (``Placement.data_axes``).
        bucket_bytes: Largest size of a buffer, except for a single larger parameter; None: the
            default of its reduction.
        widen: Keep gradients of half-precision parameters in float32.
        shards: Keep only this rank's part of sums that are scattered.
        flats: Storage of sharded parameters; each makes a bucket with its layout.
        launched: Called for every reduction that starts, with its chunk and its ``Pending``.
        refuses: See ``GradientStore``.
    """

    parameters: Sequence[ManagedParameter]
    reductions: Mapping[tuple[str, ...], Reduction]
    bucket_bytes: int | None = None
    widen: bool = True
    shards: bool = False
    flats: Sequence[FlatParameters] = ()
    launched: Callable[[int | None, Any], None] | None = None
    refuses: bool | None = False
    _chunks: dict[int | None, list[Bucket]] = field(default_factory=dict)
    _home: dict[int, Bucket] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _weighed: list[Tensor] = field(default_factory=list)
    _arrived: set[int] = field(default_factory=set)
    _expected: list[Bucket] = field(default_factory=list)
    _overlapped: OverlappedReduction | None = None
    _waiting: deque[tuple[int, Callable[[], object]]] = field(default_factory=deque)
    _sums: list[tuple[Tensor, Group]] = field(default_factory=list)
    _keeps: bool = False

    def __post_init__(self) -> None:
        self._flat_of = {managed: flat for flat in self.flats for managed in flat.parameters}
        for chunk in dict.fromkeys(managed.chunk for managed in self.parameters):
            members = [managed for managed in reversed(self.parameters) if managed.chunk == chunk]
            # in the order in which backwards complete them
            parts = sorted(self._cut(members), key=_first_place, reverse=True)
            self._chunks[chunk] = [self._allocate(part) for part in parts]
        self._sums = list(self._parts_to_sum())
        for bucket in self.buckets():
            for managed in bucket.parameters:
                parameter = managed.parameter
                self._home[id(parameter)] = bucket
                set_gradient_dtype(parameter, bucket.buffer.dtype)
                # A hook of the graph node, not of the parameter: the backward also calls it if a
                # product has accumulated into the gradient directly.
                node = get_gradient_edge(parameter).node
                self._hooks.append((node, node.register_hook(partial(self._ran, parameter))))

    @property
    def scatters(self) -> bool:
        """Return True if ``finish`` leaves each rank with the sums of a part of the gradients."""
        return any(reduction.scatter for reduction in self.reductions.values())

    def begin(self, *, keep: bool) -> None:
        """Begin a batch; with ``keep`` it adds to the gradients in ``.grad``.

        A gradient whose ``.grad`` was set to None restarts at zero.
        """
        self._keeps = keep
        self.refuses = None
        if not keep:
            self._weighed = []
            self._arrived = set()
            if self.shards:
                self._join()  # a sum may be under way
        for bucket in self.buckets():
            if not keep:
                bucket.state = bucket.state.to(GradientState.EMPTY)
                bucket.buffer.zero_()
                bucket.unsummed = None
            bucket.state = bucket.state.to(GradientState.ACCUMULATING)
            bucket.pending = None
            views = zip(bucket.parameters, bucket.views, strict=False)  # sharded: no views
            for managed, view in views if keep else ():
                gradient = managed.parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient is not view:
                    view.copy_(gradient)
        self.set_grad()

    def set_grad(self) -> None:
        """Make every parameter's ``.grad`` its view of a buffer."""
        for bucket in self.buckets():
            for managed, view in zip_longest(bucket.parameters, bucket.views):
                managed.parameter.grad = view

    def unset_grad(self) -> None:
        """Set ``.grad`` to None; the buffers keep the gradients."""
        for managed in self.parameters:
            managed.parameter.grad = None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the gradients in this context, and drop those that it leaves."""
        self.unset_grad()
        self.refuses = self._keeps
        try:
            yield
        finally:
            self.refuses = None
            self.set_grad()

    def expect(
        self, chunk: int | None, awaited: Iterable[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Declare that the next backward of ``chunk`` completes a microbatch's gradients.

        Each bucket's reduction then starts when the bucket is full: after the last microbatch, or,
        of sharded gradients, after any.
        """
        ids = None if awaited is None else {id(parameter) for parameter in awaited}
        self._expected = self._summed(chunk, last=last)
        for bucket in self._expected:
            if bucket.is_sharded:
                bucket.state = bucket.state.to(GradientState.ACCUMULATING)
            bucket.pending = sum(
                ids is None or id(managed.parameter) in ids for managed in bucket.parameters
            )
        self._launch_full()

    def complete(self, parameter: Tensor) -> None:
        """Record that the gradient of ``parameter``, one of the ``awaited``, is complete.

        Raises:
            ValueError: Gradients arrive after their sum has started, because the backward
                completes a gradient twice.
        """
        self._arrived.add(id(parameter))
        bucket = self._home[id(parameter)]
        bucket.collect(parameter)
        if bucket.pending is not None:
            if bucket.pending == 0 and bucket.state is not GradientState.ACCUMULATING:
                name = next(m.name for m in bucket.parameters if m.parameter is parameter)
                raise ValueError(
                    f"the gradient of '{name}' arrives after its sum over the replicas has started, "
                    "because the backward computes it several times. For layers that share "
                    "parameters, use torch.utils.checkpoint with use_reentrant=False"
                )
            bucket.pending = max(0, bucket.pending - 1)
            if bucket.pending == 0:
                self._launch_full()

    def reduce(self, chunk: int | None, *, last: bool = True) -> None:
        """Start the remaining reductions of a chunk, after its backward; ``last`` as in ``expect``.

        These are buckets with parameters that the backward did not use.
        """
        for bucket in self._summed(chunk, last=last):
            bucket.pending = None
            self._launch(bucket)
        if self._waiting_bytes() > _MOST_WAITING:
            self._join()  # the next forward would otherwise run while a large bucket is held

    def _summed(self, chunk: int | None, *, last: bool) -> list[Bucket]:
        """Return the buckets of a chunk that are summed after a microbatch."""
        return [bucket for bucket in self._chunks.get(chunk, ()) if last or bucket.is_sharded]

    def finish(self, scale: Tensor | float | None = None) -> None:
        """Complete all reductions and the sums over other groups, then scale.

        Starts the reductions that have not started yet.
        """
        for chunk in self._chunks:
            self.reduce(chunk)
        self._join()
        add_up(self._sums)
        for bucket in self.buckets():
            bucket.state = bucket.state.to(GradientState.REDUCED)
            if scale is not None:
                bucket.mine().mul_(scale)

    def unused(self) -> list[ManagedParameter]:
        """Return the parameters without a gradient since the last step."""
        return [
            managed for managed in self.parameters if id(managed.parameter) not in self._arrived
        ]

    def _parts_to_sum(self) -> Iterator[tuple[Tensor, Group]]:
        """Yield the parts that other groups sum, in the order of the parameters.

        The stages lay out their buckets differently, but agree on this order.
        """
        local_parts = {
            managed: (part, bucket.at(region).view(part.held_shape))
            for bucket in self.buckets()
            for managed, part, region in bucket.own_parts()
        }
        for managed in self.parameters:
            if managed in local_parts:
                part, flat = local_parts[managed]
                for region, group in part.sums:
                    yield from ((view, group) for view in part.within(region, flat))

    def weigh(self, scale: float, *, last: bool) -> None:
        """Multiply the batch's gradients by ``scale``, and set them aside for the last batch.

        With ``last``, add those of the earlier batches instead.
        """
        for chunk in self._chunks:
            self.reduce(chunk, last=False)
        self._join()
        if not self._weighed:
            self._weighed = [torch.zeros_like(bucket.buffer) for bucket in self.buckets()]
        for accumulated, bucket in zip(self._weighed, self.buckets(), strict=True):
            if last:
                bucket.buffer.mul_(scale).add_(accumulated)
            else:
                accumulated.add_(bucket.buffer, alpha=scale)
                bucket.buffer.zero_()
        if last:
            self._weighed = []

    @property
    def has_weighed(self) -> bool:
        """Return True if earlier batches of the accumulation have been weighed."""
        return bool(self._weighed)

    def close(self) -> None:
        """Detach from the parameters."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._overlapped is not None:
            self._overlapped.close()
            self._overlapped = None
        self.unset_grad()
        for managed in self.parameters:
            set_gradient_dtype(managed.parameter, managed.parameter.dtype)

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
        return chain.from_iterable(self._chunks.values())

    def _cut(self, parameters: Sequence[ManagedParameter]) -> Iterator[list[ManagedParameter]]:
        """Yield runs of parameters that may share a buffer.

        They have the same dtype, device and reduction, and are no larger than a bucket. A tied
        parameter whose sum is scattered gets a buffer of its own, which is then the same on all
        stages that hold it. Sharded parameters share a buffer as they share their storage.
        """
        kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
        for managed in parameters:
            parameter = managed.parameter
            axes = managed.placement.data_axes
            alone = managed if self.reductions[axes].scatter and managed.placement.tied else None
            shared = self._flat_of.get(managed, alone)
            key = parameter.dtype, parameter.device, axes, shared, managed.is_undivided
            kinds.setdefault(key, []).append(managed)
        for (_, _, axes, shared, _), members in kinds.items():
            limit = self.bucket_bytes if not isinstance(shared, FlatParameters) else math.inf
            if limit is None:
                limit = self.reductions[axes].bucket_bytes
            run: list[ManagedParameter] = []
            size = 0
            for managed in members:
                nbytes = managed.parameter.numel() * self._dtype(managed.parameter).itemsize
                if run and size + nbytes > limit:
                    yield run
                    run = []
                    size = 0
                run.append(managed)
                size += nbytes
            yield run

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's gradient."""
        return torch.float32 if self.widen and parameter.dtype in HALF else parameter.dtype

    def _allocate(self, managed: list[ManagedParameter]) -> Bucket:
        parameters = [member.parameter for member in managed]
        reduction = self.reductions[managed[0].placement.data_axes]
        flat = self._flat_of.get(managed[0])
        offsets, size = (
            lay_out(parameters, reduction, undivided=managed[0].is_undivided)
            if flat is None
            else ([flat.offset_of[member] for member in managed], flat.size)
        )
        dtype = self._dtype(parameters[0])
        shards = self.shards and reduction.scatter
        kept = size // reduction.parts if shards else size
        buffer = torch.zeros(kept, dtype=dtype, device=parameters[0].device)
        views = [
            buffer[offset : offset + p.numel()].view_as(p)
            for offset, p in zip(offsets, parameters, strict=True)
            if not shards
        ]
        return Bucket(managed, reduction, offsets, size, buffer, views, flat=flat)

    def _join(self) -> None:
        """Wait for the reductions in progress."""
        if self._overlapped is not None:
            self._overlapped.join()
        self._waiting.clear()  # not earlier: it holds memory that the reductions use

    def _ran(self, parameter: nn.Parameter, *_: object) -> None:
        if self.refuses is None:
            self.complete(parameter)
        elif self.refuses:
            raise own_backward_refusal()

    def _launch_full(self) -> None:
        """Start the reductions of expected full buckets, up to the first that is not full.

        Collectives must start in the same order on all replicas, regardless of the order in which
        gradients are completed.
        """
        for bucket in self._expected:
            if bucket.pending is None or bucket.pending > 0:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        launched = GradientState.ADDING if bucket.is_sharded else GradientState.REDUCING
        if bucket.state is launched:
            return
        bucket.state = bucket.state.to(launched)
        if bucket.reduction.size == 1:
            return
        if self._overlapped is None:
            self._overlapped = OverlappedReduction(bucket.buffer.device)
        pending = bucket.start_sum()
        if self.launched is not None:
            self.launched(bucket.chunk, pending)
        levels = bucket.reduction.inner.size, bucket.reduction.outer.size
        self._overlapped.launch(pending, shares=1 in levels)
        if bucket.is_sharded:
            # Otherwise a backward that is faster than the sums would leave all gradients waiting.
            self._waiting.append((bucket.size * bucket.buffer.itemsize, self._overlapped.mark()))
            while len(self._waiting) > 1 and self._waiting_bytes() > _MOST_WAITING:
                self._waiting.popleft()[1]()

    def _waiting_bytes(self) -> int:
        return sum(size for size, _ in self._waiting)


def _first_place(parameters: list[ManagedParameter]) -> int:
    return min(managed.order for managed in parameters)
