"""Callbacks that log numbers of a training step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["GradientNorm", "LearningRate", "TrainPerplexity"]


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


class LearningRate(Callback):
    """Callback that logs ``learning_rate`` with the other metrics of a step.

    One number is logged if all parameter groups have the same rate, otherwise one per group
    (``learning_rate/1`` …). With several optimizers the first one is used. Lightning's
    ``LearningRateMonitor`` draws the same curve for every group."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Log the rate of the step that begins."""
        if not trainer.optimizers:
            return
        rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        same = len(set(rates)) == 1
        for number, rate in enumerate(rates[:1] if same else rates, start=1):
            self.log("learning_rate" if same else f"learning_rate/{number}", rate, batch_size=1)


class TrainPerplexity(Callback):
    """Callback that logs ``train_perplexity``: e to the logged mean loss of the step.

    It is computed from the mean loss. Computed inside ``training_step`` it would be a mean of
    exponentials over the microbatches.

    Args:
        loss: Name under which the module logs its mean loss in nats per token; None: the module's
            attribute ``perplexity_loss``, or else ``train_loss``.
    """

    def __init__(self, loss: str | None = None) -> None:
        self.loss = loss

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log the perplexity, if the loss was logged."""
        name = self.loss or getattr(pl_module, "perplexity_loss", "train_loss")
        loss = trainer.callback_metrics.get(name)
        if loss is not None:
            self.log("train_perplexity", torch.exp(loss), batch_size=1)
