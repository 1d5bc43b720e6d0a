"""Callback that logs the perplexity of the training batches."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["TrainPerplexity"]


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
