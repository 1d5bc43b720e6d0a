"""Perplexity of the training batches."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["TrainPerplexity"]


class TrainPerplexity(Callback):
    """Log ``train_perplexity``: e to the logged mean loss of the step.

    From the mean and not inside ``training_step``, where a mean over microbatches would be taken of
    the exponentials.

    Args:
        loss: Name under which the module logs its mean loss in nats a token; None: what the
            module's attribute ``perplexity_loss`` says, or else ``train_loss``.
    """

    def __init__(self, loss: str | None = None) -> None:
        self.loss = loss

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log it, if the loss was logged."""
        name = self.loss or getattr(pl_module, "perplexity_loss", "train_loss")
        loss = trainer.callback_metrics.get(name)
        if loss is not None:
            self.log("train_perplexity", torch.exp(loss), batch_size=1)
