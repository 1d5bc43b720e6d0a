"""A LightningModule whose loss is the mean over labelled tokens: the steps, what is logged, the
optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ptdp.metrics import Perplexity
from lightning_ptdp.models.optimizer_setup import AdamWConfig, configure_adamw

__all__ = ["IGNORED_LABEL", "Batch", "LitTokens"]

IGNORED_LABEL = -100

Batch = Mapping[str, Tensor]


class LitTokens(pl.LightningModule):
    """Common base of all models that predict tokens; a model defines ``token_losses``.

    Args:
        optimizer: AdamW and its schedule.
    """

    def __init__(self, optimizer: AdamWConfig) -> None:
        super().__init__()
        # A checkpoint holds plain dictionaries, which load with weights_only=True.
        self.optimizer_config = (
            AdamWConfig(**optimizer) if isinstance(optimizer, Mapping) else optimizer
        )
        self.val_perplexity = Perplexity()

    @abstractmethod
    def token_losses(self, batch: Batch) -> Tensor:
        """Loss of each label (b, s), 0 where it is ignored."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Mean loss and the number of tokens behind it."""
        return self.mean_loss(self.token_losses(batch), batch, "train_loss")

    def validation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """As ``training_step``."""
        return self.mean_loss(self.token_losses(batch), batch, "val_loss", sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As ``training_step``."""
        return self.mean_loss(self.token_losses(batch), batch, "test_loss", sync_dist=True)

    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """``token_nll``, the negative log-likelihood of each label, 0 where it is ignored, (b, s)
        float32, and ``counted``, where it is not, (b, s) bool.

        Scores and not the predicted tokens, since they need no rank to hold the logits of the whole
        vocabulary; and of tokens, since a rank of a context group, which sees a part of the
        sequence, cannot sum over the whole. ``summarize_predictions`` does."""
        return {"token_nll": self.token_losses(batch).float(), "counted": _counted(batch)}

    def summarize_predictions(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the result of ``predict_step`` for each sample: ``nll``, the sum, ``loss``, the
        mean, and ``perplexity``, its exponential, (b,) float32; and ``token_count`` (b,) int64."""
        nll, token_count = outputs["token_nll"].sum(1), outputs["counted"].sum(1)
        loss = nll / token_count.clamp(min=1)
        return {"nll": nll, "token_count": token_count, "loss": loss, "perplexity": loss.exp()}

    def on_validation_batch_end(
        self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add the batch to the perplexity, which is over all validation loaders."""
        # Not in validation_step: a pipeline finishes that on its last stage only, and once a
        # microbatch.
        self.val_perplexity.update(outputs["loss"], outputs["num_tokens"])

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity."""
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW in two decay groups, and the schedule by step."""
        return configure_adamw(self, self.optimizer_config, self.trainer)

    def mean_loss(
        self, losses_bs: Tensor, batch: Batch, name: str, *, sync_dist: bool = False
    ) -> dict[str, Tensor]:
        """The mean over the labelled tokens, which is logged as ``name``, and their number."""
        num_tokens = _counted(batch).sum()
        # Not reduction="mean", which is 0/0 where no token counts; and summed in float32, since
        # bf16 loses small addends and fp16 overflows after some thousand tokens.
        loss = losses_bs.sum(
            dtype=torch.promote_types(losses_bs.dtype, torch.float32)
        ) / num_tokens.clamp(min=1)
        # For the mean of an evaluation's batches; a training step's microbatches are weighted by
        # their tokens instead.
        samples = batch["labels"].size(0) if sync_dist else None
        self.log(name, loss, prog_bar=True, sync_dist=sync_dist, batch_size=samples)
        return {"loss": loss, "num_tokens": num_tokens}


def _counted(batch: Batch) -> Tensor:
    return batch["labels"] != IGNORED_LABEL
