"""Gradients of an optimizer step, as the optimizer and the user's hooks see them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.data_parallel.gradient_view import GradientView
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["StepGradients"]


class StepGradients:
    """Norm, clipping and view of the gradients that ``stepped`` tensors show.

    Args:
        parameters: This rank's parameters.
        mesh: This rank's position and groups.
        device: This rank's device.
    """

    def __init__(
        self, parameters: ManagedParameters, *, mesh: ProcessMesh, device: torch.device
    ) -> None:
        self._parameters, self._mesh, self._device = parameters, mesh, device
        self._compared = False
        self.use(None)

    def use(self, store: GradientStore | None, *, steps_on_copies: bool = False) -> None:
        """Read the gradients of ``store``; None: those that autograd has made."""
        self._store = store
        self._view: GradientView | None = None
        self._is_divided = self._mesh.layout.divides_model or steps_on_copies

    def named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (order, name, value) of the gradients that the optimizer sees."""
        for managed in self._parameters.values():
            if managed.stepped is not None and managed.stepped.grad is not None:
                yield managed.order, managed.name, managed.stepped.grad

    def norm(self, chosen: Collection[Tensor] | None = None, *, order: float = 2.0) -> Tensor:
        """Return the norm of the whole model's gradient, each parameter counted once.

        With ``chosen``, only these stepped tensors are included. Collective.
        """
        counted = [
            part
            for managed in self._parameters.values()
            if (stepped := managed.stepped) is not None
            if stepped.grad is not None and managed.stepped_placement.counted
            if chosen is None or stepped in chosen
            for part in managed.stepped_placement.unrepeated(stepped.grad)
        ]
        group = self._mesh.world if self._scatters else self._mesh.group("shards")
        with self._computing():
            return global_norm(self._joined(counted), group=group, device=self._device, order=order)

    def clip(self, gradients: Iterable[Tensor], limit: float, *, norm: Tensor) -> None:
        """Scale ``gradients`` down to ``limit`` if ``norm``, their 2-norm, is larger.

        ``norm`` is over all ranks.
        """
        with self._computing():
            torch.nn.utils.clip_grads_with_norm_(map(_holder, self._joined(gradients)), limit, norm)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of hooks that may look at the gradients and change them."""
        if self._view is None and self._is_divided:
            self._view = GradientView(
                parameters=self._parameters.values(),
                everything=self._mesh.group("pipeline").size > 1 or self._scatters,
                norm=self._chosen_norm,
            )
        return contextlib.nullcontext() if self._view is None else self._view.shown()

    @property
    def _scatters(self) -> bool:
        return self._store is not None and self._store.scatters

    def _chosen_norm(self, chosen: Collection[Tensor], order: float) -> Tensor:
        """Return the norm of the tensors that a user has chosen.

        Raises:
            PartialModelError: Tied parameters are chosen on some stages only, possibly without the
                rank that counts them.
        """
        pipeline = self._mesh.group("pipeline")
        if pipeline.size > 1 and not self._compared:
            self._compared = True
            holders = [
                managed.placement.sums[-1][1]
                for managed in self._parameters.values()
                if managed.placement.tied and managed.stepped in chosen
            ]
            missing = torch.tensor(
                sum(1 - group.size if group.rank == 0 else 1 for group in holders),
                device=self._device,
            )
            dist.all_reduce(missing, group=pipeline.handle)
            if missing:
                raise PartialModelError(
                    "the parameters of a norm include tied ones that only some pipeline stages "
                    "select. Select from self.parameters(), or use pipeline_parallel_size=1"
                )
        return self.norm(chosen, order=order)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._view is None else self._view.paused()

    def _joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        return list(gradients) if self._store is None else self._store.joined(gradients)


def _holder(gradient: Tensor) -> Tensor:
    """Return a tensor whose ``.grad`` is the gradient."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder
