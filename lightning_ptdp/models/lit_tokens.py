"""Base LightningModule for models whose loss is the mean over labelled tokens.

It defines the steps, the logging and the optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ptdp.metrics import Perplexity
from lightning_ptdp.models.optimizer_setup import AdamWConfig, configure_adamw

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
        """Return the loss of each label (b, s), 0 where it is ignored."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss and its number of tokens."""
        return self.mean_loss(self.token_losses(batch), batch, "train_loss")

    def validation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Return the mean loss and its number of tokens, as ``training_step``."""
        return self.mean_loss(self.token_losses(batch), batch, "val_loss", sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Return the mean loss and its number of tokens, as ``training_step``."""
        return self.mean_loss(self.token_losses(batch), batch, "test_loss", sync_dist=True)

    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Return the negative log-likelihood of each label, and which labels count.

        ``token_nll`` is (b, s) float32, and 0 where a label is ignored. ``counted`` is (b, s) bool,
        and True where it is not.

        The result has scores instead of predicted tokens, because scores do not require a rank to
        hold the logits of the whole vocabulary. It has scores per token, because a rank of a
        context-parallel group holds only a part of the sequence and cannot sum over the whole.
        ``summarize_predictions`` computes the sums.
        """
        return {"token_nll": self.token_losses(batch).float(), "counted": _counted(batch)}

    def summarize_predictions(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return scores per sample from the result of ``predict_step``.

        ``nll`` is the sum, ``loss`` the mean and ``perplexity`` its exponential, (b,) float32;
        ``token_count`` is (b,) int64.
        """
        nll = outputs["token_nll"].sum(1)
        token_count = outputs["counted"].sum(1)
        loss = nll / token_count.clamp(min=1)
        return {"nll": nll, "token_count": token_count, "loss": loss, "perplexity": loss.exp()}

    def on_validation_batch_end(
        self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add the batch to the perplexity, which covers all validation loaders."""
        # Not in validation_step: a pipeline finishes that only on its last stage, once per
        # microbatch.
        self.val_perplexity.update(outputs["loss"], outputs["num_tokens"])

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity."""
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with two decay groups, and the schedule by step."""
        return configure_adamw(self, self.optimizer_config, self.trainer)

    def mean_loss(
        self, losses_bs: Tensor, batch: Batch, name: str, *, sync_dist: bool = False
    ) -> dict[str, Tensor]:
        """Return the mean over the labelled tokens, logged as ``name``, and their number."""
        num_tokens = _counted(batch).sum()
        # Not reduction="mean", which is 0/0 if no token counts. The sum is in float32, since bf16
        # loses small addends and fp16 overflows after some thousand tokens.
        loss = losses_bs.sum(
            dtype=torch.promote_types(losses_bs.dtype, torch.float32)
        ) / num_tokens.clamp(min=1)
        # This weights the batches of an evaluation; the microbatches of a training step are
        # weighted by their tokens instead.
        samples = batch["labels"].size(0) if sync_dist else None
        self.log(name, loss, prog_bar=True, sync_dist=sync_dist, batch_size=samples)
        return {"loss": loss, "num_tokens": num_tokens}


def _counted(batch: Batch) -> Tensor:
    return batch["labels"] != IGNORED_LABEL
