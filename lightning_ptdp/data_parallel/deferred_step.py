"""Offloaded optimizer steps that run on the CPU during the next forward.

A thread steps on one part of the parameters after another, in the order in which a forward needs
them. Code that reads a parameter waits for its part. The results are therefore the same as without
overlap. ZeRO-Offload (arXiv 2101.06840, section 5.2) instead computes with the parameters of the
previous step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.data_parallel.absent_parameters import make_absent, make_available
from lightning_ptdp.data_parallel.elementwise import equivalent_optimizer
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.shims.lightning import LightningNames
from lightning_ptdp.shims.torch import has_step_hooks


@dataclass(eq=False, kw_only=True)
class StepPart:
    """Parameters that are stepped on together.

    Attributes:
        parameters: Parameters with a value that the step changes.
        members: Those of which this rank steps on a part.
        flat: Their storage; None: each has its own.
        done: Future of the step. None: the step has ended, and the parameters have its values.
    """

    parameters: set[nn.Parameter]
    members: Sequence[ManagedParameter]
    flat: FlatParameters | None = None
    done: Future[None] | None = None

    def defer(self, done: Future[None]) -> None:
        """Let readers of the parameters wait for the step."""
        self.done = done
        if self.flat is None:
            for parameter in self.parameters:
                make_absent(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the step, and give the parameters its values."""
        assert self.done is not None
        self.done.result()
        self.done = None
        if self.flat is None:
            self.make_available()
        publish(self.members)

    def make_available(self) -> None:
        """Stop making readers wait for the step."""
        for parameter in self.parameters:
            make_available(parameter, None)


def publish(members: Iterable[ManagedParameter]) -> None:
    """Copy the values after a step to the parameters, or to this rank's part of them."""
    for managed in members:
        if managed.rounded is not None and managed.stepped is not None:
            managed.rounded.copy_(managed.stepped, non_blocking=True)


class DeferredStep:
    """Steps of an optimizer in a thread.

    Args:
        optimizer: One of torch's, which keep all states by parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer step")

    def take(self, stepped: Iterable[nn.Parameter]) -> None:
        """Take the gradients, so that the optimizer's own step, which follows, changes nothing."""
        for value in stepped:
            if value.grad is not None:
                self._gradients[value] = value.grad
                value.grad = None

    def start(self, parts: Sequence[StepPart]) -> bool:
        """Step on each part with the current hyperparameters; return False if nothing was taken."""
        if not self._gradients:
            return False
        for part in parts:
            values = {managed.stepped for managed in part.members} & self._gradients.keys()
            groups = []
            for group in self._optimizer.param_groups:
                chosen = [value for value in group["params"] if value in values]
                if chosen:
                    groups.append(self._apart(group, chosen))
            part.defer(self._thread.submit(_step, groups))
        self._gradients = {}
        return True

    def _apart(self, group: dict[str, Any], values: Iterable[nn.Parameter]) -> Optimizer:
        """Return an optimizer with the same states whose gradients the user's code cannot clear."""
        aliases = {nn.Parameter(value.detach()): value for value in values}
        apart = equivalent_optimizer(self._optimizer, group, [*aliases])
        for alias, value in aliases.items():
            alias.grad = self._gradients[value]
            apart.state[alias] = self._optimizer.state[value]
        return apart

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _step(groups: Iterable[Optimizer]) -> None:
    for group in groups:
        group.step()


def step_parts(parameters: Iterable[ManagedParameter]) -> Iterator[StepPart]:
    """Yield parts of parameters that are given in the order of a forward."""
    members: list[ManagedParameter] = []
    for managed in parameters:
        members.append(managed)
        if sum(managed.parameter.numel() for managed in members) >= _PART:
            yield StepPart(parameters={m.parameter for m in members}, members=members)
            members = []
    yield StepPart(parameters={m.parameter for m in members}, members=members)


_PART = 1 << 22  # elements


def can_defer(optimizer: Optimizer) -> bool:
    """Return True if a step uses only the optimizer's parameters and their own states.

    Optimizers from outside of torch may keep a common state of all parameters.
    """
    module = type(optimizer).__module__.split(".")
    return (
        module[:2] == ["torch", "optim"]
        and not isinstance(optimizer, torch.optim.LBFGS)
        and not has_step_hooks(optimizer)
    )


def reads_between_steps(trainer: Any, names: LightningNames) -> bool:
    """Return True if the user's hooks or callbacks may read parameters between two steps.

    Such code runs between an optimizer step and the next forward. If only one rank runs it, that
    rank would wait for the others.
    """
    return _has_hooks(type(trainer.lightning_module), names.LightningModule) or any(
        isinstance(callback, (*names.WeightAveragingCallbacks, names.LambdaCallback))
        or _has_hooks(type(callback), names.Callback)
        for callback in trainer.callbacks
    )


_HARMLESS = ("lightning", "pytorch_lightning", "lightning_ptdp")
"""Packages whose hooks read parameters only through the strategy, if at all."""
_HOOKS = (
    "on_train_",
    "on_validation_",
    "on_before_batch_",
    "on_after_batch_",
    "on_sanity_",
    "optimizer_",
    "lr_scheduler_",
    "on_save_",
)
"""Beginnings of the names of hooks that may run after a step and before the end of a forward."""


def _has_hooks(cls: type, base: type) -> bool:
    """Return True if a class overrides a hook of ``base`` with code of the user's."""
    return any(
        (hook := getattr(cls, name)) is not getattr(base, name, None)
        and getattr(hook, "__module__", "").partition(".")[0] not in _HARMLESS
        for name in dir(cls)
        if name.startswith(_HOOKS)
    )
