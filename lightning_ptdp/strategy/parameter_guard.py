"""Guard against loops over a part of the parameters in a user's step.

A sum over ``self.parameters()`` in ``training_step`` would be the sum of one pipeline stage, or of
parts of matrices. While a step runs, such a loop is therefore refused when it reaches the end of
the local parameters. ``next(self.parameters()).device`` is allowed. So is any loop outside the
steps, where optimizers and Lightning need the local parameters. This package's own forwards call
``nn.Module.named_parameters(module)``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from lightning_ptdp.base.function_replacement import PartialModelError
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.pipeline.placeholders import Placeholder


class ParameterGuard:
    """Guard of the modules of which this rank holds a part.

    Args:
        module: The LightningModule, cut.
        parameters: Its parameters.
        options: Options that divide it, for the message.

    Attributes:
        hook: The user's step that runs, if any.
        options: Options that divide the module, for the message.
    """

    def __init__(self, module: nn.Module, parameters: ManagedParameters, options: str) -> None:
        self.hook: str | None = None
        self.options = options
        split = {p for p, managed in parameters.items() if not managed.placement.is_whole}
        for name, child in module.named_modules():
            has_placeholder = any(isinstance(part, Placeholder) for part in child.modules())
            if has_placeholder or any(parameter in split for parameter in child.parameters()):
                # torch's compiler requires a method.
                vars(child)["named_parameters"] = MethodType(_GuardedParameters(name, self), child)

    def __deepcopy__(self, memo: object) -> ParameterGuard:
        """Return itself, because a copy made during a step would stay in that step."""
        return self


@dataclass(frozen=True, eq=False)
class _GuardedParameters:
    """Replacement of a module's ``named_parameters``, which ``parameters`` calls too."""

    name: str
    guard: ParameterGuard
    __name__ = "named_parameters"  # pickle finds the method by it

    def __call__(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from type(module).named_parameters(module, *args, **kwargs)
        if self.guard.hook is not None and kwargs.get("recurse", True):
            call = ".".join(filter(None, ["self", self.name, "parameters()"]))
            raise PartialModelError(
                f"{self.guard.hook} loops over {call}, but this rank has only a part of them "
                f"({self.guard.options}), so a penalty or a norm would be wrong. Use the "
                "optimizer's weight_decay, change the gradients of optimizer.param_groups in "
                "on_before_optimizer_step (p.grad.add_(p.detach(), alpha=...)), or use "
                "tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
