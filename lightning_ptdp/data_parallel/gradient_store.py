"""Storage of a rank's gradients: in buckets that replicas sum, or as autograd makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.bucket import HALF, Bucket
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.data_parallel.unbucketed_gradients import UnbucketedGradients
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.world.mesh import ProcessMesh


class GradientStore(Protocol):
    """All gradients of one rank.

    A batch is ``begin``, backwards, and ``finish`` if it completes an optimizer step. ``.grad``
    shows the gradients from ``begin`` and ``show`` until ``hide``.
    """

    @property
    def parameters(self) -> Sequence[ManagedParameter]:
        """Return the trained parameters, in forward order."""

    @property
    def scatters(self) -> bool:
        """Return True if ``finish`` leaves each rank with the sums of a part of the gradients."""

    @property
    def has_weighed(self) -> bool:
        """Return True if earlier batches of the accumulation have been weighed."""

    def begin(self, *, keep: bool) -> None:
        """Begin a batch; with ``keep`` it adds to the gradients that the parameters show."""

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

    def complete(self, parameter: Tensor) -> None:
        """Record that the gradient of ``parameter``, one of the ``awaited``, is complete."""

    def reduce(self, chunk: int | None, *, last: bool = True) -> None:
        """Start the remaining reductions of a chunk, after its backward; ``last`` as above."""

    def finish(self, scale: float | None = None) -> None:
        """Complete all sums over other ranks, then scale."""

    def weigh(self, scale: float, *, last: bool) -> None:
        """Multiply the batch's gradients by ``scale``, and set them aside for the last batch.

        With ``last``, add those of the earlier batches instead.
        """

    def show(self) -> None:
        """Make the gradients the parameters' ``.grad``."""

    def hide(self) -> None:
        """Take the gradients off the parameters and keep them, so that nothing clears them."""

    def buckets(self) -> Iterable[Bucket]:
        """Return all buckets, in backward order within each chunk."""

    def local(self) -> Iterable[Tensor]:
        """Return this rank's gradients, in few tensors."""

    def joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return the same elements in few flat tensors."""

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters to which no backward has given a gradient.

        Tied parameters are left out, because another stage may have used them.
        """

    def close(self) -> None:
        """Detach from the parameters."""


def needs_masters(config: PTDPConfig, parameters: ManagedParameters) -> bool:
    """Return True if the optimizer steps on float32 copies."""
    return config.master_weights and any(p.dtype in HALF for p in parameters if p.requires_grad)


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
