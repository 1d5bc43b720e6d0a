"""Bases of the LightningModules: optimizer, the models of this package, and losses of tokens.

Nothing here depends on the parallel layout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.metrics import Perplexity
from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import BertConfig, GPTConfig, check_tensor_parallel
from lightning_ptdp.models.optimizer_setup import AdamWConfig, configure_adamw
from lightning_ptdp.models.size import num_parameters
from lightning_ptdp.tensor_parallel import check_chunk, linear_cross_entropy
from lightning_ptdp.world.layout import ParallelLayout

DEFAULT_OPTIMIZER = AdamWConfig()

IGNORED_LABEL = -100

Batch = Mapping[str, Tensor]


class LitModel(pl.LightningModule):
    """Common base of all models.

    Args:
        optimizer: AdamW and its schedule.
    """

    def __init__(self, optimizer: AdamWConfig) -> None:
        super().__init__()
        # A checkpoint holds plain dictionaries, which load with weights_only=True.
        self.optimizer_config = (
            AdamWConfig(**optimizer) if isinstance(optimizer, Mapping) else optimizer
        )
        self.model: Any = None

    @property
    def built(self) -> Any:
        """Return the model.

        Raises:
            ValueError: It is not built yet.
        """
        if self.model is None:
            raise ValueError(
                "the model is not built yet. First call configure_model(), as the Trainer does"
            )
        return self.model

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with two decay groups, and the schedule by step."""
        return configure_adamw(self, self.optimizer_config, self.trainer)


class LitTransformer(LitModel):
    """Common base of the models of this package.

    Args:
        config: Configuration of the model.
        optimizer: AdamW and its schedule.
        loss_chunk_mb: Maximum MiB of float32 logits that the loss holds at a time.
    """

    model_class: ClassVar[type[GPT | Bert]]
    config_class: ClassVar[type[GPTConfig | BertConfig]]

    def __init__(
        self, config: GPTConfig | BertConfig, optimizer: AdamWConfig, loss_chunk_mb: float
    ) -> None:
        super().__init__(optimizer)
        check_chunk(loss_chunk_mb=loss_chunk_mb)
        self.config: Any = self.config_class(**config) if isinstance(config, Mapping) else config
        self.loss_chunk_mb = loss_chunk_mb
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "optimizer": asdict(self.optimizer_config),
                "loss_chunk_mb": loss_chunk_mb,
            }
        )

    def configure_model(self) -> None:
        """Build the model, on the meta device if the strategy requests it."""
        if self.model is None:
            self.model = self.model_class(self.config)

    def check_parallel(self, layout: ParallelLayout) -> None:
        """Refuse a layout that cannot split heads or the feed-forward part; called before launch.

        Raises:
            ValueError: As for ``check_tensor_parallel``.
        """
        check_tensor_parallel(self.config, layout.tensor_parallel_size)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the full model, over all ranks."""
        return num_parameters(self.config)

    def losses_of(self, hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        """Return the loss of each label from the input of the head."""
        return linear_cross_entropy(
            hidden,
            head,
            labels,
            ignore_index=IGNORED_LABEL,
            reduction="none",
            chunk_mb=self.loss_chunk_mb,
        )


class LitTokens(LitModel):
    """Common base of all models that predict tokens.

    Their loss is the mean over labelled tokens.

    Args:
        optimizer: AdamW and its schedule.
    """

    def __init__(self, optimizer: AdamWConfig) -> None:
        super().__init__(optimizer)
        self.val_perplexity = Perplexity()

    @abstractmethod
    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each label (b, s), 0 where it is ignored, and auxiliary losses."""

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each label (b, s), 0 where it is ignored."""
        losses_bs, _ = self._losses(batch)
        return losses_bs

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
        hold the logits of the full vocabulary. It has scores per token, because a rank of a
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

    def mean_loss(
        self, losses_bs: Tensor, batch: Batch, name: str, *, sync_dist: bool = False
    ) -> dict[str, Tensor]:
        """Return the mean over the labelled tokens, logged as ``name``, and their number."""
        num_tokens = _counted(batch).sum()
        loss = mean_of(losses_bs, num_tokens)
        # This weights the batches of an evaluation; the microbatches of a training step are
        # weighted by their tokens instead.
        samples = batch["labels"].size(0) if sync_dist else None
        self.log(name, loss, prog_bar=True, sync_dist=sync_dist, batch_size=samples)
        return {"loss": loss, "num_tokens": num_tokens}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label, in at least float32.

    A loss in half precision is too coarse to be summed.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    losses = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.view(labels.shape)


def mean_of(losses: Tensor, count: Tensor) -> Tensor:
    """Return the sum of losses over their count, 0 if nothing counts.

    The sum is in float32, since bf16 loses small addends and fp16 overflows after some thousand
    tokens.
    """
    wide = torch.promote_types(losses.dtype, torch.float32)
    return losses.sum(dtype=wide) / count.clamp(min=1)


def _counted(batch: Batch) -> Tensor:
    return batch["labels"] != IGNORED_LABEL
