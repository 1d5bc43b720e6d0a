"""GPT as a LightningModule: the loss, what is logged, the optimizer. Nothing here knows how it is parallelized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ptdp.metrics import Perplexity
from lightning_ptdp.models.config import GPTConfig, check_tensor_parallel
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.optimization import AdamWConfig, configure_adamw
from lightning_ptdp.models.own_plans import gpt_plan
from lightning_ptdp.models.size import flops_per_sample, num_parameters
from lightning_ptdp.tensor_parallel import DEFAULT_CHUNK_MB, ParallelPlan, check_chunk, linear_cross_entropy
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["IGNORED_LABEL", "LitGPT"]

IGNORED_LABEL = -100

_DEFAULT_OPTIMIZER = AdamWConfig()

Batch = Mapping[str, Tensor]


class LitGPT(pl.LightningModule):
    """Language modelling with a GPT.

    A batch is a mapping with ``input_ids`` (b, s) int64 and ``labels`` (b, s) int64: the token that follows each input token
    (already shifted), or -100 where no token is to be predicted. The loss is the mean over the counted tokens.

    Logs ``train_loss`` each step; ``val_loss`` and ``val_perplexity``, or ``test_loss``, each epoch.

    Args:
        config: The model.
        optimizer: AdamW and its schedule.
        loss_chunk_mb: MiB of logits, in float32, that the loss has at a time; it computes them twice where there are more
            (``linear_cross_entropy``).
    """

    def __init__(
        self, config: GPTConfig, optimizer: AdamWConfig = _DEFAULT_OPTIMIZER, loss_chunk_mb: float = DEFAULT_CHUNK_MB
    ) -> None:
        super().__init__()
        check_chunk(loss_chunk_mb=loss_chunk_mb)
        # A checkpoint holds plain dictionaries, which load with weights_only=True.
        self.config = GPTConfig(**config) if isinstance(config, Mapping) else config
        self.optimizer_config = AdamWConfig(**optimizer) if isinstance(optimizer, Mapping) else optimizer
        self.loss_chunk_mb = loss_chunk_mb
        self.save_hyperparameters(
            {"config": asdict(self.config), "optimizer": asdict(self.optimizer_config), "loss_chunk_mb": loss_chunk_mb}
        )
        self.model: GPT | None = None
        self.val_perplexity = Perplexity()

    def configure_model(self) -> None:
        """Build the model, on the meta device where the strategy asks for that."""
        if self.model is None:
            self.model = GPT(self.config)

    def configure_parallel(self) -> ParallelPlan:
        """How the model is cut."""
        return gpt_plan(self.config, prefix="model")

    def check_parallel(self, layout: ParallelLayout) -> None:
        """Refuse a layout under which heads or the feed-forward part cannot be shared out; called before launch.

        Raises:
            ValueError: Of ``check_tensor_parallel``.
        """
        check_tensor_parallel(self.config, layout.tensor_parallel_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (b, s) -> logits (b, s, V)."""
        return self._built()(input_ids)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Mean loss and the number of tokens behind it."""
        return self._step(batch, "train_loss")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As ``training_step``."""
        return self._step(batch, "val_loss", sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As ``training_step``."""
        return self._step(batch, "test_loss", sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """``token_nll``, the negative log-likelihood of each label, 0 where it is ignored, (b, s) float32, and ``counted``, where it is
        not, (b, s) bool.

        Scores and not the predicted tokens, since they need no rank to hold the logits of the whole vocabulary; and of tokens, since a
        rank of a context group, which sees a part of the sequence, cannot sum over the whole. ``summarize_predictions`` does.
        """
        return {"token_nll": self._token_losses(batch).float(), "counted": _counted(batch)}

    def summarize_predictions(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``predict_step`` gives, for each sample: ``nll``, the sum, ``loss``, the mean, and ``perplexity``, its exponential, (b,)
        float32; and ``token_count`` (b,) int64."""
        nll, token_count = outputs["token_nll"].sum(1), outputs["counted"].sum(1)
        loss = nll / token_count.clamp(min=1)
        return {"nll": nll, "token_count": token_count, "loss": loss, "perplexity": loss.exp()}

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the batch to the perplexity, which is over all validation loaders."""
        # Not in validation_step: a pipeline finishes that on its last stage only, and once a microbatch.
        self.val_perplexity.update(outputs["loss"], outputs["num_tokens"])

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity."""
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW in two decay groups, and the schedule by step."""
        return configure_adamw(self, self.optimizer_config, self.trainer)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, wherever they live."""
        return num_parameters(self.config)

    def flops_per_sample(self, sequence_length: int | None = None) -> int:
        """Model operations, forward and backward, of one training sequence (None: of the longest)."""
        return flops_per_sample(self.config, sequence_length=sequence_length)

    def _step(self, batch: Batch, name: str, *, sync_dist: bool = False) -> dict[str, Tensor]:
        num_tokens = _counted(batch).sum()
        # Not reduction="mean", which is 0/0 where no token counts; and summed in float32, since bf16 loses
        # small addends and fp16 overflows after some thousand tokens.
        loss = self._token_losses(batch).sum(dtype=torch.float32) / num_tokens.clamp(min=1)
        self.log(name, loss, prog_bar=True, sync_dist=sync_dist, batch_size=batch["labels"].size(0))
        return {"loss": loss, "num_tokens": num_tokens}

    def _token_losses(self, batch: Batch) -> Tensor:
        """Loss of each token (b, s), 0 where it is ignored."""
        model = self._built()
        hidden = model(batch["input_ids"], logits=False)
        return linear_cross_entropy(
            hidden, model.head, batch["labels"], ignore_index=IGNORED_LABEL, reduction="none", chunk_mb=self.loss_chunk_mb
        )

    def _built(self) -> GPT:
        if self.model is None:
            raise ValueError("the model is not built yet: call configure_model() first, as the Trainer does")
        return self.model


def _counted(batch: Batch) -> Tensor:
    return batch["labels"] != IGNORED_LABEL
