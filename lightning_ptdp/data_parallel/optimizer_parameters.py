"""Tensors on which the optimizer steps: parameters, masters, or shards.

Masters are float32 copies of parameters in half precision, or copies in the memory of the host.

The user's optimizer is kept, with its groups, hyperparameters and schedulers. Only the tensors in
its groups are replaced, before its first step. A sharded optimizer (ZeRO-1, arXiv 1910.02054,
section 5.1) gets one-dimensional pieces::

    bucket        | w0 . . . | w1 . . . . . . | b1 | w2 . .    |
    rank 0 of 2   | w0 . . . | w1 . .                              steps on w0, first part of w1
    rank 1                            | . . . | b1 | w2 . .    |   steps on the rest

Parameters that an optimizer needs unsharded, such as Muon's matrices, have buckets of their own, in
which every parameter belongs to exactly one rank. Sharded parameters are stored in the same layout.

The parameters of a bucket are views of one flat tensor, and their gradients are views of another.
The pieces may have different hyperparameters.

After the step, all ranks gather the parts of the flat parameters, bucket by bucket in the order of
the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.absent_parameters import set_access
from lightning_ptdp.data_parallel.bucket import HALF, Bucket
from lightning_ptdp.data_parallel.deferred_step import (
    DeferredStep,
    StepPart,
    can_defer,
    publish,
    step_parts,
)
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters, ParameterState
from lightning_ptdp.data_parallel.full_matrices import FullMatrices
from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.world.mesh import Group


class OptimizerParameters:
    """Replacement of an optimizer's tensors; keeps the model's parameters up to date.

    Args:
        gradients: The rank's gradients; sharded if their reduction scatters.
        config: The strategy's options.
        tensor: The tensor group.

    Raises:
        ValueError: The optimizer needs unsharded parameters, which cannot be in the host's memory.
    """

    def __init__(
        self, gradients: GradientStore, *, config: PTDPConfig, tensor: Group | None = None
    ) -> None:
        self._gradients = gradients
        self._config = config
        self._flat: list[FlatParameters] = []
        self._flat_of: dict[nn.Parameter, FlatParameters] = {}
        self._late: list[StepPart] = []
        self._versions: dict[ManagedParameter, int] = {}
        self._deferred: DeferredStep | None = None
        self._hooks: list[Any] = []
        for managed in gradients.parameters:
            values = managed.parameter.detach()
            if gradients.scatters:
                managed.step_on(None)
            elif (master := self._master(values)) is not None:
                managed.step_on(master, rounded=values)
        if gradients.scatters:
            self._parts = [self._shard(bucket) for bucket in gradients.buckets()][::-1]
        else:
            self._parts = [*step_parts(gradients.parameters)]
        cut = [managed for managed in gradients.parameters if is_cut_for_step(managed, tensor)]
        self._matrices = None
        if cut and config.offload_optimizer:
            raise ValueError(
                f"offload_optimizer=True: the optimizer needs all of '{cut[0].name}', which the "
                "ranks of a tensor group gather on the device. Use offload_optimizer=False, or an "
                "optimizer that works element by element"
            )
        if cut and tensor is not None:
            owned = [managed for managed in cut if managed.stepped is not None]
            self._matrices = FullMatrices(owned, tensor)

    def adopt(self, optimizer: Optimizer, *, defers: bool = False) -> None:
        """Put the new tensors into the optimizer's groups, in place.

        Schedulers keep references to the groups. With ``defers``, offloaded steps run on the CPU
        during the next forward if the optimizer allows it.
        """
        managed_of = {managed.parameter: managed for managed in self._gradients.parameters}
        for group in optimizer.param_groups:
            indices = [
                index
                for index, p in enumerate(group["params"])
                if p not in managed_of or managed_of[p].stepped is not None
            ]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][index] for index in indices]
            before = [group["params"][index] for index in indices]
            group["params"] = [managed_of[p].stepped if p in managed_of else p for p in before]
        for parameter, managed in managed_of.items():
            state = optimizer.state.pop(parameter, None)
            if state is not None and managed.stepped is not None:
                optimizer.state[managed.stepped] = _state_of(managed, state)
        if defers and self._config.offload_optimizer and can_defer(optimizer):
            self._deferred = DeferredStep(optimizer)
            for part in self._parts:
                for parameter in part.parameters if part.flat is None else ():
                    set_access(parameter, partial(self._arrive, parameter))

    def attach(self, module: nn.Module) -> None:
        """Let code of the module that reads parameters unnoticed wait for their values.

        Code that reads a parameter with torch's functions waits by itself
        (``absent_parameters.py``), even a hook between the steps. Compiled code and kernels read
        parameters without being noticed. Their modules therefore wait when they are called.
        """
        self._hooks = [
            module.register_state_dict_pre_hook(lambda *_: self.wait()),
            module.register_load_state_dict_pre_hook(lambda *_: self.wait()),
        ]
        if self._config.overlap_parameter_gather and (self._flat or self._deferred is not None):
            for called in _called(module):
                wait = partial(self.wait, {*called.parameters()})
                self._hooks.append(called.register_forward_pre_hook(lambda *_, wait=wait: wait()))

    def set_grad(self) -> None:
        """Give the summed gradients to the optimizer.

        If they are shards, the parameters' own gradients are removed from ``.grad``, because these
        are sums over one replica only.
        """
        self.take_values()
        for managed in self._gradients.parameters:
            stepped = managed.stepped
            gradient = managed.gradient
            if stepped is not None and managed.steps_on_copy and not self._is_full_matrix(managed):
                gradient = managed.parameter.grad if gradient is None else gradient
                copies = self._deferred is not None  # the next step reuses the memory
                stepped.grad = (
                    None if gradient is None else self._like(stepped, gradient, copy=copies)
                )
        if self._config.offload_optimizer and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the optimizer reads the gradients now
        if self._matrices is not None:
            self._matrices.set_grad()
        if self._gradients.scatters:
            self._gradients.unset_grad()

    def _is_full_matrix(self, managed: ManagedParameter) -> bool:
        return self._matrices is not None and managed in self._matrices

    def publish(self) -> None:
        """Round the masters and start to gather the parameters, after the optimizer's step.

        With ``overlap_parameter_gather`` they arrive during the next forward.
        """
        self.wait()
        if self._deferred is not None and self._deferred.start(self._parts):
            self._late = [*self._parts]
            for part in self._parts:
                if part.flat is not None:
                    part.flat.stepped(partial(self._settle, part))
        else:
            with torch.no_grad():
                publish(m for m in self._gradients.parameters if not self._is_full_matrix(m))
                if self._matrices is not None:
                    self._matrices.publish()
            for flat in reversed(self._flat):
                flat.stepped()
        if not self._config.overlap_parameter_gather:
            self.wait()

    def take(self) -> None:
        """Defer the optimizer's step, which follows, until ``publish``, if it may be deferred."""
        if self._deferred is not None:
            self._deferred.take(
                m.stepped for m in self._gradients.parameters if m.stepped is not None
            )

    def _settle(self, part: StepPart) -> None:
        """Finish a deferred step up to ``part``; all replicas then gather in the same order."""
        while part in self._late:
            first = self._late.pop(0)
            try:
                first.finish()
                self._versions |= {m: m.parameter._version for m in first.members}
            except BaseException:
                for lost in (first, *self._late):
                    if lost.flat is None or not lost.flat.frees:
                        lost.make_available()
                self._late.clear()
                raise
            if first.flat is not None:
                first.flat.settle = None
                if not first.flat.frees:
                    first.flat.start_gather()

    def _arrive(self, parameter: nn.Parameter, _: str | None) -> bool:
        """Return True when a parameter has the values of the last step."""
        self.wait({parameter})
        return True

    def wait(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Return when ``parameters`` (all by default) have the values of the last step."""
        for part in [*self._late]:
            if parameters is None or not part.parameters.isdisjoint(parameters):
                self._settle(part)
        gathering = [flat for flat in self._flat if flat.state is ParameterState.GATHERING]
        chosen = {self._flat_of.get(p) for p in parameters or ()} if gathering else set()
        for flat in reversed(gathering):
            if parameters is None or flat in chosen:
                flat.wait()

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the values that the user's code has given to parameters since the last step."""
        for flat in self._flat:
            flat.take_values()
        for part in self._parts:
            for managed in part.members if part.flat is None else ():
                values = managed.parameter.detach()
                rounded = managed.rounded
                if rounded is not None and values.data_ptr() != rounded.data_ptr():
                    managed.parameter.data = rounded
                    managed.parameter.copy_(values)  # counts as a write
        # After a deferred step, no user hook can write to parameters unnoticed, and a comparison
        # would copy all weights to the device of the masters.
        self._reload(
            managed
            for managed in self._gradients.parameters
            if self._deferred is None or managed.parameter._version != self._versions.get(managed)
        )
        if self._matrices is not None:
            self._matrices.take_values()

    def reload(self) -> None:
        """Update the masters from parameters that were changed by other code."""
        self._reload(self._gradients.parameters)
        if self._matrices is not None:
            self._matrices.reload()

    @torch.no_grad()
    def _reload(self, parameters: Iterable[ManagedParameter]) -> None:
        """Update masters where elements differ from the rounded masters."""
        for managed in parameters:
            rounded = managed.rounded
            stepped = managed.stepped
            if rounded is not None and stepped is not None and not self._is_full_matrix(managed):
                values = rounded.to(stepped.device)
                unchanged = stepped.to(values.dtype) == values
                stepped.copy_(torch.where(unchanged, stepped, values.to(stepped.dtype)))

    def close(self) -> None:
        """Wait for all parameters, detach from the module and release the buckets.

        Saving the optimizer needs the stepped tensors further on.
        """
        self.wait()
        for hook in self._hooks:
            hook.remove()
        if self._deferred is not None:
            self._deferred.close()
        for managed in self._gradients.parameters:
            managed.gradient = None

    def _shard(self, bucket: Bucket) -> StepPart:
        """Step on this rank's part of a bucket."""
        members = []
        flat = bucket.flat
        if flat is None:
            flat = FlatParameters.of(
                bucket.parameters,
                bucket.offsets,
                bucket.size,
                bucket.reduction,
                device=bucket.buffer.device,
            )
            self._flat.append(flat)
            self._flat_of.update({managed.parameter: flat for managed in bucket.parameters})
        for managed, part, region in bucket.own_parts():
            values = flat.at(region).view(part.held_shape)
            master = self._master(values)
            managed.step_on(
                nn.Parameter(values) if master is None else master,
                part,
                rounded=None if master is None else values,
                gradient=bucket.at(region).view(part.held_shape),
            )
            members.append(managed)
        parameters = {managed.parameter for managed in bucket.parameters}
        return StepPart(parameters=parameters, members=members, flat=flat)

    def _master(self, values: Tensor) -> nn.Parameter | None:
        """Return the copy on which the optimizer steps; None: it steps on ``values``."""
        widens = self._config.master_weights and values.dtype in HALF
        offloads = self._config.offload_optimizer
        if not (widens or offloads):
            return None
        device = "cpu" if offloads else values.device
        like = torch.empty((), dtype=torch.float32 if widens else values.dtype, device=device)
        return nn.Parameter(self._like(like, values, copy=True))

    @staticmethod
    def _like(stepped: Tensor, values: Tensor, *, copy: bool = False) -> Tensor:
        """Return ``values`` with the dtype and on the device of ``stepped``.

        A copy to the host is queued, to memory that is locked for it. The device changes the dtype,
        because the host would read memory that is not locked while the copy may still run.
        """
        if stepped.device == values.device:
            return values.to(stepped.dtype, copy=copy)
        target = torch.empty(values.shape, dtype=stepped.dtype, pin_memory=True)
        return target.copy_(values.to(stepped.dtype), non_blocking=True)


def is_cut_for_step(managed: ManagedParameter, tensor: Group | None) -> bool:
    """Return True if the optimizer needs all of a parameter that tensor parallelism has cut."""
    return (
        managed.is_undivided
        and tensor is not None
        and tensor.size > 1
        and "tensor" in managed.placement.sharded
    )


def _state_of(managed: ManagedParameter, state: dict[str, object]) -> dict[str, object]:
    """Cut the optimizer's state of a full parameter to the stepped tensor.

    The optimizer created the state in its constructor.
    """
    shape = managed.parameter.shape
    converted: dict[str, object] = {}
    for key, value in state.items():
        # Like torch, tell a step count from a state of a parameter without dimensions by its name.
        if isinstance(value, Tensor) and value.shape == shape and (shape or key != "step"):
            if managed.stepped_placement.flat is not None:
                value = value.reshape(-1)[slice(*managed.stepped_placement.flat)].clone()
            if managed.rounded is not None and value.is_floating_point():
                value = value.to(managed.stepped)
        converted[key] = value
    return converted


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost containers, and modules outside that have no children.

    Modules of torch and of this package, which read parameters with torch's functions, are left
    out.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from child.children()
        elif isinstance(child, torch.jit.ScriptModule):
            yield child
        elif next(child.children(), None) is None:
            if type(child).__module__.partition(".")[0] not in ("torch", "lightning_ptdp"):
                yield child
        else:
            yield from _called(child)
