"""Gathering of a sharded optimizer's parameters during the next forward.

A block of a repeated container waits for its own parameters when it is called. All other parameters
are waited for before the step. A block that was not called in the previous step (because its parts
are called directly, or it is skipped) is treated like the other parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters
from lightning_ptdp.shims.lightning import LightningNames

__all__ = ["ParameterGather", "overlaps_gather"]

_HOOKS = (
    "on_train_",
    "on_validation_",
    "on_before_",
    "on_after_",
    "on_sanity_",
    "optimizer_",
    "lr_scheduler_",
    "on_save_",
)


class ParameterGather:
    """Waits for parameters before they are used.

    Args:
        module: The LightningModule, whose ``state_dict`` and ``load_state_dict`` wait for all
            parameters.
        stepped: Gathers the parameters.
        overlaps: Let each block wait for its own parameters.
    """

    def __init__(self, module: nn.Module, stepped: OptimizerParameters, *, overlaps: bool) -> None:
        self._stepped, self._module = stepped, module
        self._called: set[nn.Module] = set()
        self._hooks: list[Any] = [
            module.register_state_dict_pre_hook(lambda *_: stepped.wait()),
            module.register_load_state_dict_pre_hook(lambda *_: stepped.wait()),
        ]
        self._blocks = (
            {block: list(block.parameters()) for block in _blocks(module)} if overlaps else {}
        )
        self._hooks += [block.register_forward_pre_hook(self._enter) for block in self._blocks]

    def begin(self) -> None:
        """Begin a step: wait for the parameters that no block waits for."""
        late = {id(p) for block in self._called for p in self._blocks[block]}
        self._called.clear()
        self._stepped.wait([p for p in self._module.parameters() if id(p) not in late])

    def ended(self) -> None:
        """Start to gather the parameters, after the optimizer has stepped."""
        self._stepped.publish()
        if not self._blocks:
            self._stepped.wait()

    def close(self) -> None:
        """Wait for all parameters and detach from the module."""
        self._stepped.wait()
        for hook in self._hooks:
            hook.remove()

    def _enter(self, block: nn.Module, _: object) -> None:
        self._called.add(block)
        self._stepped.wait(self._blocks[block])


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children with parameters of the outermost containers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from (
                block for block in child.children() if any(True for _ in block.parameters())
            )
        else:
            yield from _blocks(child)


def overlaps_gather(trainer: Any, asked: bool | None, names: LightningNames) -> bool:
    """Return True if blocks wait for their own parameters.

    The default is True if nothing reads parameters between the steps. Weight averaging reads them,
    so it always prevents the overlap.
    """
    averaging = [
        type(c).__name__ for c in trainer.callbacks if isinstance(c, names.WeightAveragingCallbacks)
    ]
    if asked and averaging:
        warnings.warn(
            f"overlap_parameter_gather=True has no effect with {averaging[0]}, which reads all "
            "parameters after every step",
            stacklevel=2,
        )
    if asked is None:
        return not _is_read_between_steps(trainer, names)
    return asked and not averaging


def _is_read_between_steps(trainer: Any, names: LightningNames) -> bool:
    """Return True if hooks or callbacks may read parameters between two steps.

    These are the user's, which run between an optimizer's step and the next forward.
    """
    return _has_hooks(type(trainer.lightning_module), names.LightningModule) or any(
        isinstance(callback, (*names.WeightAveragingCallbacks, names.LambdaCallback))
        or (
            type(callback).__module__.split(".")[0] not in _HARMLESS
            and _has_hooks(type(callback), names.Callback)
        )
        for callback in trainer.callbacks
    )


_HARMLESS = ("lightning", "pytorch_lightning", "lightning_ptdp")
"""Packages whose callbacks read parameters only through the strategy, if at all."""


def _has_hooks(cls: type, base: type) -> bool:
    """Return True if a class overrides a hook of ``base``."""
    return any(
        getattr(cls, name) is not getattr(base, name, None)
        for name in dir(cls)
        if name.startswith(_HOOKS)
    )
