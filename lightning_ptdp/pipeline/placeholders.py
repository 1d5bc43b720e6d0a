"""Placeholders for the modules of other pipeline stages.

They hold no parameters, but keep the attributes that models inspect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.pipeline.boundary import Boundary
from lightning_ptdp.pipeline.containers import Layer
from lightning_ptdp.pipeline.crossing import StageError, StageExit
from lightning_ptdp.pipeline.remote_modules import (
    UserHooks,
    check_kept,
    plain_attributes,
    user_hooks,
)
from lightning_ptdp.pipeline.stage_run import StageRun

_READABLE = (Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class Placeholder(nn.Module):
    """Base class of the placeholders.

    It keeps the plain attributes of the original module and its children, because models inspect
    their layers.
    """

    def __init__(self, name: str, original: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        for key, value in plain_attributes(name, original).items():
            if key not in vars(self) and key != "forward":
                self.__dict__[key] = value
        self.training = original.training
        self._ptdp_name = name
        self._ptdp_boundary = boundary
        self._ptdp_hooks: dict[str, UserHooks] = {}

    def _keep_hooks(self, original: nn.Module, *, inside: bool = True) -> None:
        """Keep the user hooks of ``original`` and its submodules, each with a placeholder."""
        for hooks in user_hooks(self._ptdp_name, original, inside=inside):
            outer = hooks.name == self._ptdp_name
            module = self if outer else Placeholder(hooks.name, hooks.module, self._ptdp_boundary)
            self._ptdp_hooks[hooks.name] = replace(hooks, module=module)

    def _replay_hooks(self, args: tuple[object, ...]) -> None:
        """Call the hooks with the outputs that they received on the original's stage."""
        for name, position, output in self._ptdp_boundary.seen_by_hooks(self._ptdp_name):
            inputs = args if name == self._ptdp_name else (self._ptdp_boundary.running.unknown(),)
            self._ptdp_hooks[name].replay(position, inputs, output)

    def _running(self) -> StageRun:
        if self._ptdp_boundary.run is None:
            raise StageError(
                f"block '{self._ptdp_name}' is on another pipeline stage, and the model was "
                "called outside of a step of the Trainer, or again by a backward. Under a pipeline, "
                "only trainer.fit, validate, test and predict can run the model. To recompute "
                "activations, use PTDPStrategy(recompute='full') instead of torch.utils.checkpoint"
            )
        return self._ptdp_boundary.run

    def __getattr__(self, key: str) -> NoReturn:
        name = self.__dict__.get("_ptdp_name", "?")
        check_kept(self, key)
        raise AttributeError(
            f"'{name}' and its attribute '{key}' are on another pipeline stage. If the weight "
            f"is used without calling the module, tie it (head.weight = {name}.weight), or "
            f"keep the module on every stage: ParallelPlan(everywhere=('{name}',))"
        )


class EarlierBlock(Placeholder):
    """A block of an earlier stage.

    It returns the received output and calls the hooks that users have registered on the block.
    """

    def __init__(self, layer: Layer, original: nn.Module, boundary: Boundary) -> None:
        super().__init__(layer.name, original, boundary)
        self._ptdp_layer = layer
        self._keep_hooks(original)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the output of the last block of this container on the earlier stages."""
        passes = self._running().passes
        layer = self._ptdp_layer
        if layer.is_first:
            passes[layer.container] += 1
            if passes[layer.container] > 1:
                raise StageError(
                    "one step calls the repeated blocks more than once, but a pipeline stage "
                    "sends one hidden state per microbatch. Concatenate the inputs along the "
                    "batch dimension and call the model once, or use pipeline_parallel_size=1"
                )
        output = self._ptdp_boundary.earlier_output(layer)
        self._replay_hooks(args)
        return output


class LaterBlock(Placeholder):
    """A block of a later stage: leaves the step."""

    def __init__(self, layer: Layer, original: nn.Module, boundary: Boundary) -> None:
        super().__init__(layer.name, original, boundary)
        self._ptdp_layer = layer

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Leave the step with the arguments of the block."""
        self._running()
        raise StageExit(self._ptdp_boundary.leave(self._ptdp_layer, args, kwargs))


class Absent(Placeholder):
    """A module after the blocks, which only the last stage reaches."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ``StageError``."""
        raise StageError(
            f"'{self._ptdp_name}' belongs to the last pipeline stage but was used before the "
            "repeated blocks. Add it to the plan: ParallelPlan(before=(...,))"
        )

    __getitem__ = forward  # of a list or dictionary of parameters or modules


class RemoteWeight(Tensor):
    """Weight of a stub, of which only the dtype and the device can be read."""

    stub: Stub

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Return the dtype or the device, or raise the error of the stub."""
        if function in _READABLE:
            return super().__torch_function__(function, types, args, kwargs)
        tensors = iterate_tensors((args, kwargs))
        weight = next(tensor for tensor in tensors if isinstance(tensor, cls))
        return Placeholder.__getattr__(weight.stub, "weight")


class Stub(Placeholder):
    """A module before the blocks.

    It returns zeros of the right shape, which the first placeholder block ignores.
    """

    def __init__(
        self, name: str, original: nn.Module, boundary: Boundary, shape: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(name, original, boundary)
        self._ptdp_shape = shape
        self._ptdp_dtype = getattr(getattr(original, "weight", None), "dtype", None)
        self._keep_hooks(original, inside=False)

    @property
    def weight(self) -> Tensor:
        """Return a tensor with the dtype and device of the weight, and nothing else."""
        run = self._ptdp_boundary.run
        if self._ptdp_dtype is None or run is None or run.received is None:
            raise AttributeError("weight")  # continues in __getattr__
        device = next((tensor.device for tensor in run.received.tensors), None)
        weight = torch.empty(0, dtype=self._ptdp_dtype, device=device).as_subclass(RemoteWeight)
        weight.stub = self
        return weight

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return zeros in the shape of the original's output."""
        run = self._ptdp_boundary.run
        if run is not None and run.blocks_called:
            raise StageError(
                f"'{self._ptdp_name}' belongs to the first pipeline stage but was called after "
                "the repeated blocks. If it follows the blocks, add it to the plan: "
                "ParallelPlan(after=(...,)), or between=(...,) if it precedes a further "
                "container. If the step calls the model more than once, concatenate the "
                "inputs along the batch dimension and call it once"
            )
        self._replay_hooks((x, *args))
        return self._ptdp_boundary.mark(self._ptdp_shape(x))


def stub_shape(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function that makes an output of the right shape without the module's weights.

    The result is None if there is no such function for the module's type.
    """
    if isinstance(module, nn.Embedding):
        if type(module).forward is not nn.Embedding.forward and not module.weight.requires_grad:
            # A fixed table that may be called with positions as numbers: every stage keeps it.
            return None
        return partial(_zeros_after_lookup, width=module.embedding_dim, dtype=module.weight.dtype)
    if isinstance(module, nn.Linear):
        out = module.out_features
        return partial(_zeros_after_linear, width=out)
    if isinstance(module, _NORMS) or (
        type(module).__name__.endswith("Norm") and _is_elementwise(module)
    ):
        dense = type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
        return Tensor.contiguous if dense else _unchanged
    return None


def _is_elementwise(module: nn.Module) -> bool:
    """Return True if a module looks like a norm of the user's, which keeps the shape.

    That is the case if its parameters are one or more vectors and it has no children. A module
    without parameters does not qualify, because it may be a norm of weights.
    """
    dimensions = {parameter.dim() for parameter in module.parameters()}
    return not list(module.children()) and dimensions == {1}


# Module-level functions, not closures: a cut model, and the Trainer that holds it, can be pickled.


def _zeros_after_lookup(x: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*x.shape, width, dtype=dtype, device=x.device)


def _zeros_after_linear(x: Tensor, *, width: int) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _unchanged(x: Tensor) -> Tensor:
    return x
