"""Callback that logs the norm of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GradientNorm"]


class GradientNorm(Callback):
    """Callback that logs ``grad_norm``: the global 2-norm of the gradient before clipping.

    A strategy that shards parameters computes the norm while it clips, and provides it as
    ``gradient_norm`` (a scalar tensor, or None before the first clipped step). Without clipping,
    ``compute_gradient_norm()`` of the strategy is called. If every rank holds the whole gradient
    (one device, DDP), the norm is computed here. With any other strategy nothing is logged."""

    def __init__(self) -> None:
        self._norm: Tensor | None = None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute the norm before clipping changes the gradient."""
        strategy: Any = trainer.strategy
        if hasattr(strategy, "compute_gradient_norm"):
            self._norm = None if trainer.gradient_clip_val else strategy.compute_gradient_norm()
        elif isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            gradients = [
                p.grad
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            self._norm = torch.nn.utils.get_total_norm(gradients)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Log the last step's norm."""
        norm = (
            self._norm
            if self._norm is not None
            else getattr(trainer.strategy, "gradient_norm", None)
        )
        if norm is not None:
            self.log("grad_norm", norm, batch_size=1)
