"""Guard against numbers that a user's step computes from a part of the parameters.

A sum over ``self.parameters()`` in ``training_step`` would be the sum of one pipeline stage, or of
parts of matrices. While a step runs, these are refused:

- a loop over parameters, when it reaches the end of the local ones.
  ``next(self.parameters()).device`` is allowed;
- a loop over modules, if the code around it names an attribute such as ``weight``; in hooks, also
  ``apply``, if the code looks for classes such as ``nn.Linear``;
- in the first step of a kind, a number computed from a matrix of which the rank has a part, and a
  product with such a matrix in the forward of another module than its own.

``state_dict()`` is refused where it is saved, in hooks and after ``fit``: the file would have a
part of the model, which nothing shows. In other hooks, ``zip`` over parameters of a pipeline stage
is refused, and so are collectives of ``torch.distributed`` over parameters. A loop in code that
computes norms or sums causes a warning.

Everything else inside the forward of a module is allowed: a layer computes with its part. So are
loops of libraries, such as optimizers and Lightning, outside of the steps.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.base.torch_calls import PRODUCTS, TorchCall, is_mode_frame
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.shims.torch import has_compiled_parts
from lightning_ptdp.strategy.user_frames import (
    LIBRARIES,
    collectives_in,
    frames,
    is_allowed_loop,
    is_saved,
    names_in,
    names_in_function,
    refusing_world_collectives,
    running_module,
)
from lightning_ptdp.world.layout import ParallelLayout

_INSIDE = ("_call_impl", "_named_members")
"""Functions of torch around a forward and a loop over parameters."""
_PRODUCTS = PRODUCTS | {
    *("linear", "bilinear", "embedding", "conv1d", "conv2d", "conv3d", "baddbmm", "tensordot")
}
"""Names of functions whose result is wrong or incomplete if a factor is a part of a matrix."""
_LAYERS = {"Linear", "Embedding"}
"""Classes of layers that the tensor ranks' parts do not have."""
_NUMBERS = {"norm", "vector_norm", "sum", "mean", "std", "var", "histogram", "histc"}
"""Names of functions that compute a number from a tensor."""


class ParameterGuard:
    """Guard of the modules of which this rank holds a part.

    Args:
        module: The LightningModule, cut.
        parameters: Its parameters.
        layout: The layout that divides it.
        refuse: Raises the error for a collective over all processes in a step, which is refused
            under a pipeline.

    Attributes:
        hook: The user's step that runs, if any.
        module: The LightningModule.
        options: Description of the layout, for messages.
        owners: Parameter -> modules that have it as an attribute.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: ManagedParameters,
        layout: ParallelLayout,
        *,
        refuse: Callable[[str], object],
    ) -> None:
        self.hook: str | None = None
        self._refuse = refuse
        self._layout = layout
        self.module = module
        self.options = layout.describe()
        self._seen: set[str] = set()
        self._attributes = {managed.name.rpartition(".")[2] for managed in parameters.values()}
        self._faults: dict[Tensor, str] = {}
        split = set[Tensor]()
        for parameter, managed in parameters.items():
            name = managed.name
            if not managed.placement.is_full:
                split.add(parameter)
                self._faults[parameter] = f"'{name}', but this rank has only a part of it"
            elif "tensor" in managed.placement.partial:
                self._faults[parameter] = (
                    f"'{name}', but its gradient is summed over tensor ranks that all compute it"
                )
        self._replaces_layers = any(
            type(child).__module__.startswith("lightning_ptdp.tensor_parallel")
            for child in module.modules()
        )
        self.owners: dict[Tensor, list[nn.Module]] = {}
        for name, child in module.named_modules():
            for parameter in child.parameters(recurse=False):
                self.owners.setdefault(parameter, []).append(child)
            has_placeholder = any(isinstance(part, Placeholder) for part in child.modules())
            if has_placeholder or any(parameter in split for parameter in child.parameters()):
                # torch's compiler requires methods.
                for guarded in (_named_parameters, _named_modules, _apply, _state_dict):
                    method = MethodType(_Guarded(guarded, name, self, has_placeholder), child)
                    vars(child)[guarded.__name__[1:]] = method

    def __deepcopy__(self, memo: object) -> ParameterGuard:
        """Return itself, because a copy made during a step would stay in that step."""
        return self

    @contextlib.contextmanager
    def during(self, hook: str, *, watches: bool) -> Iterator[None]:
        """Guard a call of a step; with ``watches``, also the numbers of its first call.

        Raises:
            PartialModelError: The step does something that the docstring of this file lists.
        """
        first = hook not in self._seen
        self._seen.add(hook)
        watches &= first and not has_compiled_parts(self.module)
        self.hook = hook
        try:
            with contextlib.ExitStack() as watching:
                if first and self._layout.model_parallel_size > 1:
                    self._warn_of_world_size()
                if watches:  # torch's compiler must see the collectives themselves
                    if self._layout.pipeline_parallel_size > 1:
                        watching.enter_context(refusing_world_collectives(self._refuse))
                    watching.enter_context(_StepValues(self, self._faults))
                yield
        except RuntimeError as error:
            is_unused = "to not have been used in the graph" in str(error)
            if not is_unused or self._layout.pipeline_parallel_size == 1:
                raise
            raise PartialModelError(
                f"{hook} differentiates with respect to a tensor that another rank has used "
                f"({self.options}): {error} A gradient penalty, for example, needs "
                "pipeline_parallel_size=1"
            ) from error
        finally:
            self.hook = None

    def _warn_of_world_size(self) -> None:
        """Warn of a step that may scale its loss by the number of all ranks."""
        if "world_size" in names_in_function(getattr(self.module, str(self.hook), None)):
            warnings.warn(
                f"{self.hook} reads world_size, which counts all ranks of each replica "
                f"({self.options}). To scale a loss or a count by the number of replicas, use "
                "self.trainer.strategy.distributed_sampler_kwargs['num_replicas']",
                stacklevel=2,
            )

    def refusal(self, fault: str) -> PartialModelError:
        """Return the error of a step with this fault."""
        return PartialModelError(
            f"{self.hook} {fault} ({self.options}), so a penalty or a norm would be wrong. Use the "
            "optimizer's weight_decay, change the gradients of optimizer.param_groups in "
            "on_before_optimizer_step (p.grad.add_(p.detach(), alpha=...)), or use "
            "tensor_parallel_size=1 and pipeline_parallel_size=1"
        )

    def users_frames(self) -> list[FrameType]:
        """Return the frames of the user's code, from the calling line to the step or hook.

        There are none if the calling line is a library's, or if the forward of a module runs.
        """
        found: list[FrameType] = []
        for package, frame in frames():
            function = frame.f_code.co_name
            if function in _INSIDE and frame.f_locals.get("self") is not self.module:
                return []
            if package == "torch" or is_mode_frame(frame):
                continue
            if not found and package in LIBRARIES:
                return []
            found.append(frame)
            if function.startswith("on_") if self.hook is None else function == self.hook:
                return found
        return []

    def mentions_parameters(self) -> bool:
        """Return True if the user's code names an attribute such as ``weight``."""
        return not self._attributes.isdisjoint(self._users_names())

    def misses_layers(self) -> bool:
        """Return True if the user's hook looks for a class of layers that tensor ranks replace."""
        names = self._users_names() if self.hook is None and self._replaces_layers else set()
        return not (self._attributes.isdisjoint(names) or _LAYERS.isdisjoint(names))

    def _users_names(self) -> set[str]:
        names: set[str] = set()
        for frame in self.users_frames():
            names |= names_in(frame.f_code)
            owners = vars(type(self.module)), frame.f_globals
            called = [owner[name] for name in names for owner in owners if name in owner]
            names |= set().union(*(names_in(c.__code__) for c in called if inspect.isfunction(c)))
        return names


@dataclass(frozen=True, eq=False)
class _Guarded:
    """Replacement of a method of a module.

    Attributes:
        method: The new method.
        name: Name of the module.
        guard: The guard.
        is_cut: Whether parts of the module are on other pipeline stages.
    """

    method: Callable[..., Any]
    name: str
    guard: ParameterGuard
    is_cut: bool

    @property
    def __name__(self) -> str:  # pickle finds the method by it
        return self.method.__name__[1:]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.method(self, module, *args, **kwargs)

    def loop(self, method: str) -> str:
        return ".".join(filter(None, ["self", self.name, method]))

    def check_layers(self, method: str) -> None:
        """Refuse a hook that looks for layers by their class, to change their parameters."""
        if self.guard.misses_layers():
            raise PartialModelError(
                f"a hook looks for layers such as nn.Linear with {self.loop(method)}, but this rank "
                f"has other layers in their places ({self.guard.options}). Change the layers in "
                "__init__, configure_model or setup, before the strategy divides the model"
            )

    def refusal(self, method: str) -> PartialModelError:
        return self.guard.refusal(
            f"loops over {self.loop(method)}, but this rank has only a part of them"
        )


def _named_parameters(
    guarded: _Guarded, module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield as ``named_parameters`` does, which ``parameters`` calls too."""
    guard = guarded.guard
    recurses = kwargs.get("recurse", True)
    users = guard.users_frames() if guard.hook is None and recurses else []
    if calls := set().union(*map(collectives_in, users)):
        raise PartialModelError(
            f"{users[-1].f_code.co_name} loops over {guarded.loop('parameters()')} and calls "
            f"torch.distributed.{min(calls)}, but this rank has only a part of them "
            f"({guard.options}), which the others do not have. Remove the call: the strategy keeps "
            "weights and gradients of all replicas equal"
        )
    if _NUMBERS & set().union(*(names_in(frame.f_code) for frame in users)):
        warnings.warn(
            f"{users[-1].f_code.co_name} loops over {guarded.loop('parameters()')}, but this rank "
            "has only a part of them, so a norm or a sum is that of the part. "
            "trainer.strategy.gather_state_dict() returns all of them, if all ranks call it",
            stacklevel=2,
        )
    line = linecache.getline(users[0].f_code.co_filename, users[0].f_lineno) if users else ""
    if guarded.is_cut and "zip(" in line:
        raise PartialModelError(
            f"a hook pairs {guarded.loop('parameters()')} with others, but this rank has only those "
            "of its pipeline stage, which need not match. Use pipeline_parallel_size=1"
        )
    yield from type(module).named_parameters(module, *args, **kwargs)
    if guard.hook is not None and recurses and not is_allowed_loop():
        raise guarded.refusal("parameters()")


def _named_modules(
    guarded: _Guarded, module: nn.Module, memo: Any = None, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Module]]:
    """Yield as ``named_modules`` does, which ``modules`` calls too."""
    yield from type(module).named_modules(module, memo, *args, **kwargs)
    # With a memo, the loop is over the modules of a module around this one.
    guard = guarded.guard
    if memo is None and guard.hook is not None and guard.mentions_parameters():
        raise guarded.refusal("modules()")
    if memo is None:
        guarded.check_layers("modules()")


def _apply(guarded: _Guarded, module: nn.Module, function: Callable[[nn.Module], Any]) -> nn.Module:
    """Call ``function`` for the modules as ``apply`` does."""
    guarded.check_layers("apply()")
    return type(module).apply(module, function)


def _state_dict(guarded: _Guarded, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the state as ``state_dict`` does."""
    # With a destination, the state is a part of that of a module around this one.
    if kwargs.get("destination") is None and not args and is_saved():
        raise PartialModelError(
            f"{guarded.loop('state_dict()')} is saved here, but this rank has only a part of the "
            f"model ({guarded.guard.options}). Use trainer.save_checkpoint(path), "
            "trainer.strategy.export_huggingface(folder), or the whole state from "
            "trainer.strategy.gather_state_dict(), all of them on all ranks"
        )
    return type(module).state_dict(module, *args, **kwargs)


class _StepValues(PartialValues):
    """Mode that refuses to compute numbers from parameters outside of the modules' forwards.

    ``faults`` maps these parameters to a text with the name and the reason.
    """

    def __init__(self, guard: ParameterGuard, faults: Mapping[Tensor, str]) -> None:
        super().__init__(
            lambda fault, function: guard.refusal(f"computes a number ({function}) from {fault}")
        )
        self._guard = guard
        self._names.update(faults)
        self._owners = {**guard.owners}

    def _follow(self, call: TorchCall, parts: list[Tensor], result: Tensor) -> Tensor:
        running = running_module()
        in_layer = running is not None and running is not self._guard.module
        if not in_layer and not self._guard.users_frames():
            return parts[0]
        foreign = self._foreign(parts, running)
        if foreign is not None and call.name in _PRODUCTS:
            raise PartialModelError(
                f"{type(running or self._guard.module).__name__} calls {call.name} with the weight "
                f"{self._names[foreign]} ({self._guard.options}). Call the layer of this weight "
                "instead, which communicates, or leave it out of ParallelPlan(tensor=...)"
            )
        if not in_layer:
            return super()._follow(call, parts, result)
        if foreign is not None:
            self._names[result] = self._names[foreign]
            self._owners[result] = self._owners.get(foreign, [])
        return parts[0]

    def _foreign(self, parts: list[Tensor], running: nn.Module | None) -> Tensor | None:
        """Return the first part of a weight that does not belong to the running module."""
        if type(running).__module__.startswith("lightning_ptdp."):
            return None  # communicates itself
        return next((part for part in parts if running not in self._owners.get(part, ())), None)
