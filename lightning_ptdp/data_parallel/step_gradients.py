"""Gradients of an optimizer step, as the optimizer and the user's hooks see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.base.torch_calls import TorchCall
from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.shims.torch import replaced_total_norm
from lightning_ptdp.world.mesh import ProcessMesh


class StepGradients:
    """Norm, clipping and view of the gradients of ``stepped`` tensors.

    Args:
        parameters: This rank's parameters.
        mesh: This rank's position and groups.
        device: This rank's device.
    """

    def __init__(
        self, parameters: ManagedParameters, *, mesh: ProcessMesh, device: torch.device
    ) -> None:
        self._parameters = parameters
        self._mesh = mesh
        self._device = device
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
        """Return the norm of the uncut model's gradient, each parameter counted once.

        With ``chosen``, only these stepped tensors are included. Collective.
        """
        counted = list[Tensor]()
        for managed in self._parameters.values():
            stepped = managed.stepped
            if (
                stepped is None
                or stepped.grad is None
                or (chosen is not None and stepped not in chosen)
            ):
                continue
            if managed.stepped_placement.counted:
                counted += managed.stepped_placement.unrepeated(stepped.grad)
        group = self._mesh.world if self._scatters else self._mesh.group("shards")
        with self.computing():
            return global_norm(self._joined(counted), group=group, device=self._device, order=order)

    def clip(self, gradients: Iterable[Tensor], limit: float, *, norm: Tensor) -> None:
        """Scale ``gradients`` down to ``limit`` if ``norm``, their 2-norm, is larger.

        ``norm`` is over all ranks.
        """
        with self.computing():
            torch.nn.utils.clip_grads_with_norm_(map(_holder, self._joined(gradients)), limit, norm)

    def for_hooks(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of hooks that may look at the gradients and change them."""
        if self._view is None and self._is_divided:
            self._view = GradientView(
                parameters=self._parameters.values(),
                everything=self._mesh.group("pipeline").size > 1 or self._scatters,
                norm=self._chosen_norm,
            )
        return contextlib.nullcontext() if self._view is None else self._view.active()

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

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which this package computes with parts, which hooks may not do."""
        return contextlib.nullcontext() if self._view is None else self._view.paused()

    def _joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        return list(gradients) if self._store is None else self._store.joined(gradients)


def _holder(gradient: Tensor) -> Tensor:
    """Return a tensor whose ``.grad`` is the gradient."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder


class UnusedGradients:
    """Removes the zero gradients of parameters that no rank has used.

    An optimizer moves a parameter with a zero gradient by its momentum and decay. In one process
    such a parameter has no gradient, and does not move.

    Args:
        parameters: This rank's parameters.
        count: Number of the uncut model's parameters.
        mesh: This rank's position and groups.
        device: This rank's device.
    """

    def __init__(
        self, parameters: ManagedParameters, *, count: int, mesh: ProcessMesh, device: torch.device
    ) -> None:
        # Stages and tensor ranks may share a parameter that only some of them use.
        self._group = mesh.world
        orders = [managed.order for managed in parameters.values()]
        held = torch.zeros(count, dtype=torch.uint8)
        held[orders] = 1
        self._held = held.to(device)
        self._used = self._held
        self._exchange: dist.Work | None = None

    def remove(self, store: GradientStore) -> None:
        """Remove the gradients of unused parameters before the optimizer's step.

        Collective over the world. Only a rank with unused parameters waits for the others' answer.
        """
        unused = store.unused()
        if self._group.size > 1:
            self._start_exchange([managed.order for managed in unused])
            if not unused:
                return
            self._wait()
            flags = self._used.tolist()
            unused = [managed for managed in unused if not flags[managed.order]]
        for managed in unused:
            if managed.stepped is not None:
                managed.stepped.grad = None

    def _start_exchange(self, unused: list[int]) -> None:
        """Start to exchange which parameters are used."""
        self._wait()  # the memory of the last exchange can now be given away
        self._used = self._held.clone()
        if unused:
            self._used[unused] = 0
        self._exchange = dist.all_reduce(
            self._used, op=dist.ReduceOp.MAX, group=self._group.handle, async_op=True
        )

    def _wait(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()


# ---- View of the gradients for hooks that run between the backward and the step ------------------
#
# ``parameter.grad`` is the gradient of the optimizer's step; with a sharded optimizer it is this
# rank's flat part. Elementwise changes act on the uncut model's gradient, because every rank makes
# them. A norm computed by torch's functions is the norm of the uncut model. Any other number would
# cover only a part, and is refused.


_Asks: Any = Tensor
_GETS = _Asks.grad.__get__
_SETS = _Asks.grad.__set__


class GradientView(PartialValues):
    """Context around the hooks.

    Args:
        parameters: This rank's parameters.
        everything: True if other ranks hold a part of each of them, or hold other parameters.
        norm: Computes the norm of a given order of the gradients of tensors, over all ranks.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[ManagedParameter],
        everything: bool,
        norm: Callable[[Collection[Tensor], float], Tensor],
    ) -> None:
        super().__init__(_refusal)
        self._owned = {
            managed.stepped: managed for managed in parameters if managed.stepped is not None
        }
        self._stepped = {managed.parameter: value for value, managed in self._owned.items()}
        self._divided = {
            managed.name: (stepped.shape, managed.placement.divided_dims)
            for stepped, managed in self._owned.items()
            if managed.placement.divided_dims
        }
        self._everything = everything
        self._norm = norm
        self._paused = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Activate the view inside the context."""
        with replaced_total_norm(self._total_norm), self:
            try:
                yield
            finally:
                self._names.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the view, so that this package can compute with parts."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call and check its result; gradients are those of the stepped tensors."""
        if self._paused:
            return call.run()
        function = call.function
        if function not in (_GETS, _SETS):
            return super().observe_call(call)
        owner = self._stepped.get(call.first, call.first)
        result = function(owner, *call.others)
        managed = self._owned.get(owner) if function == _GETS and result is not None else None
        if managed is not None and (self._everything or not managed.placement.is_full):
            self._names[result] = managed.name
        return result

    def _total_norm(
        self,
        original: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: Any = None,
    ) -> Tensor:
        # A rank without a shard of a parameter has no gradient of it.
        gradients: list[Tensor] = (
            [tensors]
            if isinstance(tensors, Tensor)
            else [tensor for tensor in tensors if tensor is not None]
        )
        if self._paused or (gradients and not any(tensor in self._names for tensor in gradients)):
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        with self.paused():
            owners = {tensor.grad: tensor for tensor in self._owned if tensor.grad is not None}
            unknown = next((tensor for tensor in gradients if tensor not in owners), None)
            if unknown is not None:
                raise _refusal(self._names.get(unknown, "another tensor"), "get_total_norm")
            norm = self._norm({owners[tensor] for tensor in gradients}, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is not finite, so they "
                "cannot be clipped"
            )
        return norm


def _refusal(name: str, function: str) -> PartialModelError:
    return PartialModelError(
        f"a hook needs the whole gradient of '{name}' ({function}), but this rank has only a part "
        "of it. Use torch.nn.utils.clip_grad_norm_ or get_total_norm, "
        "self.clip_gradients(...), Trainer(gradient_clip_val=...), "
        "trainer.strategy.compute_gradient_norm(), or PTDPStrategy(check_finite='skip') for "
        "gradients that are not finite"
    )
