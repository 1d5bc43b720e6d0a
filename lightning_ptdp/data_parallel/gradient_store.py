"""Storage of a rank's gradients: in buckets that replicas sum, or as autograd makes them.

A single replica needs no buckets, because only a reduction needs flat buffers. Autograd then keeps
the first microbatch's gradients as they are, whereas a buffer would have to be cleared and added
to. As with buckets, the gradients can be removed from ``.grad`` and kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.bucket import HALF, Bucket, GradientState, own_backward_refusal
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters
from lightning_ptdp.data_parallel.gradient_sums import add_up
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.shims.torch import gradient_dtype, set_gradient_dtype
from lightning_ptdp.world.mesh import ProcessMesh


class GradientStore(Protocol):
    """All gradients of one rank.

    A batch is ``begin``, backwards, and ``finish`` if it completes an optimizer step. ``.grad``
    holds the gradients from ``begin`` and ``set_grad`` until ``unset_grad``. The defaults are those
    of a store whose reductions do not start before ``finish``.
    """

    parameters: Sequence[ManagedParameter]
    """The trained parameters, in forward order."""
    refuses: bool | None = False
    """True: a backward of the user's own is refused. False: its gradients are dropped. None, which
    ``begin`` sets: those of backwards are the batch's."""

    @property
    def scatters(self) -> bool:
        """Return True if ``finish`` leaves each rank with the sums of a part of the gradients."""
        return False

    @property
    def has_weighed(self) -> bool:
        """Return True if earlier batches of the accumulation have been weighed."""

    def begin(self, *, keep: bool) -> None:
        """Begin a batch; with ``keep`` it adds to the gradients in ``.grad``."""

    def expect(
        self, chunk: int | None, awaited: Iterable[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Declare that the next backward of ``chunk`` completes a microbatch's gradients.

        Args:
            chunk: The stage.
            awaited: Parameters with an incomplete gradient, each completed by a call of
                ``complete``; by default all of them, each completed by autograd.
            last: No other microbatch follows before the optimizer's step.
        """
        return

    def complete(self, parameter: Tensor) -> None:
        """Record that the gradient of ``parameter``, one of the ``awaited``, is complete."""
        return

    def reduce(self, chunk: int | None, *, last: bool = True) -> None:
        """Start the remaining reductions of a chunk, after its backward; ``last`` as above."""
        return

    def finish(self, scale: float | None = None) -> None:
        """Complete all sums over other ranks, then scale."""

    def weigh(self, scale: float, *, last: bool) -> None:
        """Multiply the batch's gradients by ``scale``, and set them aside for the last batch.

        With ``last``, add those of the earlier batches instead.
        """

    def set_grad(self) -> None:
        """Make the gradients the parameters' ``.grad``."""

    def unset_grad(self) -> None:
        """Set ``.grad`` to None and keep the gradients, so that nothing clears them."""

    def set_aside(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a microbatch's step, which must not change the gradients.

        The step may clear gradients, or run a backward of its own (adversarial samples). In one
        process without accumulation it finds none, and Lightning clears those that it leaves.

        Raises:
            ValueError: It leaves some, which one process would add to those of earlier batches.
        """

    def buckets(self) -> Iterable[Bucket]:
        """Return all buckets, in backward order within each chunk."""
        return ()

    def local(self) -> Iterable[Tensor]:
        """Return this rank's gradients, in few tensors."""

    def joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return the same elements in few flat tensors."""
        return list(gradients)

    def unused(self) -> list[ManagedParameter]:
        """Return the parameters to which no backward has given a gradient since the last step."""

    def close(self) -> None:
        """Detach from the parameters."""


def needs_masters(config: PTDPConfig, parameters: ManagedParameters) -> bool:
    """Return True if the optimizer steps on copies, in float32 or on the host."""
    return config.offload_optimizer or (
        config.master_weights and any(p.dtype in HALF for p in parameters if p.requires_grad)
    )


def make_store(
    *,
    config: PTDPConfig,
    mesh: ProcessMesh,
    parameters: ManagedParameters,
    launched: Callable[[int | None, Any], None],
    flats: Sequence[FlatParameters] = (),
) -> GradientStore:
    """Return buckets if gradients are summed over ranks that read different data.

    Otherwise return gradients as autograd creates them. ``flats`` is the storage of sharded
    parameters.
    """
    reductions = make_reductions(config, mesh)
    trained = [managed for managed in parameters.values() if managed.parameter.requires_grad]
    trained.sort(key=lambda managed: managed.order)
    widen = config.master_weights and config.gradient_dtype == "float32"
    if all(reduction.size == 1 for reduction in reductions.values()):
        return UnbucketedGradients(trained, widen=widen)
    return GradientBuckets(
        trained,
        reductions,
        bucket_bytes=None if config.bucket_mb is None else int(config.bucket_mb * 2**20),
        widen=widen,
        shards=config.shards_gradients,
        flats=flats,
        launched=launched,
    )


def make_reductions(config: PTDPConfig, mesh: ProcessMesh) -> dict[tuple[str, ...], Reduction]:
    """Return the sums of gradients over each tuple of data axes."""
    return {axes: _reduction(config, mesh, axes) for axes in mesh.layout.gradient_sums}


def _reduction(config: PTDPConfig, mesh: ProcessMesh, axes: tuple[str, ...]) -> Reduction:
    nodes = config.data_parallel_replicas
    size = math.prod(map(mesh.layout.size, axes))
    inner, outer = mesh.levels(axes, nodes if size % nodes == 0 else 1)
    return Reduction(
        inner=inner,
        outer=outer,
        scatter=config.shards_optimizer and inner.size > 1,
        dtype=_dtype(config.reduce_dtype),
        outer_dtype=_dtype(config.inter_node_reduce_dtype),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


# ---- Gradients of a single replica ---------------------------------------------------------------


@dataclass(eq=False)
class UnbucketedGradients(GradientStore):
    """Gradients of a rank of a single replica.

    Args:
        parameters: Trained parameters in forward order. The order must be the same on all ranks
            that sum some of them.
        widen: Keep gradients of half-precision parameters in float32.
    """

    parameters: Sequence[ManagedParameter]
    widen: bool = True
    _state: GradientState = GradientState.EMPTY
    _keeps: bool = False
    _arrived: set[nn.Parameter] = field(default_factory=set)
    _removed: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _weighed: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parameter in self._each():
            if self.widen and parameter.dtype in HALF:
                set_gradient_dtype(parameter, torch.float32)

    def begin(self, *, keep: bool) -> None:
        """Begin a batch; with ``keep`` it adds to the gradients in ``.grad``."""
        self._keeps = keep
        self._removed = {}
        if not keep:
            self._state = self._state.to(GradientState.EMPTY)
            self._weighed = {}
            self._arrived = set()
            for parameter in self._each():
                parameter.grad = None
        self._state = self._state.to(GradientState.ACCUMULATING)

    def set_grad(self) -> None:
        """Restore the removed gradients, and add them to those of a hook's own backward."""
        for parameter, gradient in self._removed.items():
            own = parameter.grad
            parameter.grad = gradient if own is None else gradient.add_(own)

    def unset_grad(self) -> None:
        """Set ``.grad`` to None and keep the gradients."""
        self._note_arrived()
        for parameter in self._each():
            if parameter.grad is not None:
                self._removed[parameter] = parameter.grad
                parameter.grad = None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the gradients in this context, and drop those that it leaves."""
        kept = [(parameter, parameter.grad) for parameter in self._each()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
            if self._keeps and any(parameter.grad is not None for parameter, _ in kept):
                raise own_backward_refusal()
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def finish(self, scale: float | None = None) -> None:
        """Complete the sums over other ranks, and scale."""
        self._state = self._state.to(GradientState.REDUCING)
        self._note_arrived()
        parts = []
        for managed in self.parameters:
            parameter = managed.parameter
            for region, group in managed.placement.sums:
                if parameter.grad is None:
                    dtype = gradient_dtype(parameter)
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
                views = managed.placement.within(region, parameter.grad)
                parts += [(view, group) for view in views]
        add_up(parts)
        if scale is not None:
            for gradient in self.local():
                gradient.mul_(scale)
        self._state = self._state.to(GradientState.REDUCED)

    def weigh(self, scale: float, *, last: bool) -> None:
        """Multiply the batch's gradients by ``scale``, and set them aside for the last batch.

        With ``last``, add those of the earlier batches instead.
        """
        self._note_arrived()
        for parameter in self._each():
            total = _sum(self._weighed.get(parameter), parameter.grad, scale)
            self._weighed[parameter] = None if last else total
            parameter.grad = total if last else None
        if last:
            self._weighed = {}

    @property
    def has_weighed(self) -> bool:
        """Return True if earlier batches of the accumulation have been weighed."""
        return bool(self._weighed)

    def local(self) -> Iterator[Tensor]:
        """Return the gradients that exist."""
        return (parameter.grad for parameter in self._each() if parameter.grad is not None)

    def unused(self) -> list[ManagedParameter]:
        """Return the parameters without a gradient since the last step."""
        return [managed for managed in self.parameters if managed.parameter not in self._arrived]

    def close(self) -> None:
        """Detach from the parameters."""
        self._removed = {}
        for parameter in self._each():
            parameter.grad = None
            set_gradient_dtype(parameter, parameter.dtype)

    def _note_arrived(self) -> None:
        """Note which parameters have gradients, before zeros are created for the others."""
        if self._state is not GradientState.REDUCED:
            self._arrived |= {p for p in self._each() if p.grad is not None}

    def _each(self) -> Iterator[nn.Parameter]:
        return (managed.parameter for managed in self.parameters)


def _sum(accumulated: Tensor | None, gradient: Tensor | None, scale: float) -> Tensor | None:
    if gradient is None:
        return accumulated
    gradient.mul_(scale)
    return gradient if accumulated is None else accumulated.add_(gradient)
