"""Gradients of the modules that a step without images does not call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.shims.transformers import image_parts

__all__ = ["ImageGradients"]


class ImageGradients:
    """Removes zero gradients of a vision tower after a step in which no replica had an image.

    An optimizer moves a parameter with a zero gradient by its momentum and decay. In one process
    the tower would have no gradient, and would not move.

    Args:
        module: The LightningModule, this rank's part.
        device: This rank's device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._names, self._device, self._called = image_parts(module), device, False
        self._hooks = [
            module.get_submodule(name.rstrip(".")).register_forward_pre_hook(self._calls)
            for name in self._names
        ]

    def remove_unused(self, parameters: Iterable[ManagedParameter]) -> None:
        """Remove the tower's gradients if no rank has called it since the last optimizer step.

        Collective over the world.
        """
        if not self._names:
            return
        called = torch.tensor(int(self._called)).to(self._device, non_blocking=True)
        if dist.is_initialized():
            dist.all_reduce(called, op=dist.ReduceOp.MAX)
        called_here, self._called = self._called, False
        # Only a rank without images waits for the others' answer.
        if called_here or called.item():
            return
        for managed in parameters:
            if managed.stepped is not None and managed.name.startswith(self._names):
                managed.stepped.grad = None

    def close(self) -> None:
        """Detach from the module."""
        for hook in self._hooks:
            hook.remove()

    def _calls(self, module: nn.Module, _args: object) -> None:
        self._called |= module.training
