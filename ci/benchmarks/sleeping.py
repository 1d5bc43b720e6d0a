"""Blocks that only sleep: a pipeline of them shows what the engine itself costs, also on a machine
with few cores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SleepingBlock", "Sleeps"]


@dataclass(frozen=True, kw_only=True)
class Sleeps:
    """Sleeping times of a block in seconds.

    Attributes:
        forward: In the forward.
        backward: In the backward: for the gradient of the input alone if ``weight`` is not 0.
        weight: In the weight gradient, where it is apart.
    """

    forward: float
    backward: float
    weight: float = 0.0


class SleepingBlock(nn.Module):
    """(...) -> (...), the same values; the gradient of its weight is 1 for each microbatch.

    With ``sleeps.weight`` somebody must ask for the weight gradient: our runtime by setting
    ``weight_gradients``, a pipeline that hands out functions to call later by calling
    ``add_weight_gradient``."""

    def __init__(self, sleeps: Sleeps, *, size: int = 1) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.weight = nn.Parameter(torch.zeros(size))
        self.weight_gradients: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self)

    def weight_gradient(self) -> Tensor:
        """Sleep for it, and return it."""
        time.sleep(self.sleeps.weight)
        return torch.ones_like(self.weight)

    def add_weight_gradient(self) -> None:
        """Sleep for it, and add it."""
        gradient = self.weight_gradient()
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad.add_(gradient)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: SleepingBlock) -> Tensor:
        ctx.block = block
        time.sleep(block.sleeps.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        block = ctx.block
        time.sleep(block.sleeps.backward)
        if not block.sleeps.weight:
            return grad.clone(), torch.ones_like(block.weight), None
        if block.weight_gradients is not None:
            block.weight_gradients.defer(block.weight, block.weight_gradient)
        return grad.clone(), None, None
