"""BERT as a LightningModule: losses and logging.

Nothing here depends on the parallel layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.metrics import MeanLoss, TokenAccuracy
from lightning_ptdp.models.bert import Bert, BertOutput, bert_plan
from lightning_ptdp.models.lit_tokens import (
    DEFAULT_OPTIMIZER,
    IGNORED_LABEL,
    Batch,
    LitTransformer,
    cross_entropy,
    mean_of,
)
from lightning_ptdp.models.model_config import BertConfig
from lightning_ptdp.models.optimizer_setup import AdamWConfig
from lightning_ptdp.models.size import bert_flops_per_sample
from lightning_ptdp.tensor_parallel import DEFAULT_CHUNK_MB, ParallelPlan

_LOSSES = ("loss", "masked_loss", "order_loss")


class LitBert(LitTransformer):
    """Pretraining of a BERT on masked tokens and sentence order (arXiv 1810.04805, section 3.1).

    A batch is a mapping with ``input_ids``, ``token_type_ids``, ``attention_mask`` and ``labels``,
    (b, s) int64, and ``next_sentence_label`` (b,) int64: the arguments of Hugging Face's
    ``BertForPreTraining``. Labels are the original tokens at the positions to predict and -100
    elsewhere. The sentence label is 0 if the second sentence follows the first, 1 if it does not,
    and -100 for a padding row. With ``masked_positions`` (b, k) int64, the decoder runs only at k
    positions. They must include every position that has a label, and are filled up with positions
    that have none.

    The loss is the mean of the masked-LM losses over the predicted tokens, plus ``order_weight``
    times the mean of the sentence losses. A sample has the number of its predicted tokens as its
    weight in both means. Microbatches and replicas therefore add up to the loss of the full batch
    in every layout. For samples of equal length, the loss is the papers' sum of two means.

    Logs ``train_loss``, ``train_masked_loss`` and ``train_order_loss`` in each step. For
    validation, it logs the same three with ``val_``, and ``val_masked_accuracy`` and
    ``val_order_accuracy``, in each epoch: exact means over all counted tokens or samples. Tests use
    ``test_``.

    Args:
        config: Configuration of the model.
        optimizer: AdamW and its schedule.
        order_weight: Factor of the sentence loss; 0 leaves it out of training.
        loss_chunk_mb: Maximum MiB of the decoder's float32 logits that the training loss holds at a
            time. Larger logits are computed in chunks, twice (``linear_cross_entropy``).
    """

    model_class = Bert
    config_class = BertConfig
    perplexity_loss = "train_masked_loss"
    """Name of the logged loss that is a mean over tokens (``TrainPerplexity``)."""

    def __init__(
        self,
        config: BertConfig,
        optimizer: AdamWConfig = DEFAULT_OPTIMIZER,
        order_weight: float = 1.0,
        loss_chunk_mb: float = DEFAULT_CHUNK_MB,
    ) -> None:
        super().__init__(config, optimizer, loss_chunk_mb)
        if order_weight < 0:
            raise ValueError(
                f"order_weight={order_weight} must not be negative. Use 0 to train on masked "
                "tokens only"
            )
        self.order_weight = order_weight
        self.save_hyperparameters({"order_weight": order_weight})
        self.val_metrics = _Metrics()
        self.test_metrics = _Metrics()

    def configure_parallel(self) -> ParallelPlan:
        """Return the plan by which the model is split."""
        return bert_plan(self.config, prefix="model")

    def forward(self, batch: Batch) -> BertOutput:
        """Return the logits of both heads; a batch needs only ``input_ids``."""
        return self._run(batch, logits=True)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss and its number of predicted tokens."""
        output = self._run(batch, logits=False)
        decoder = self.built.masked_head.decoder
        masked = self.losses_of(output.masked, decoder, _labels(batch))
        losses = self._losses(masked, output.order, batch)
        for name in _LOSSES:
            self.log(f"train_{name}", losses[name], prog_bar=True)
        return {"loss": losses["loss"], "num_tokens": losses["num_tokens"]}

    def validation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Return the losses, and the predictions of both heads."""
        output = self(batch)
        masked = cross_entropy(output.masked, _labels(batch))
        losses = self._losses(masked, output.order, batch)
        return {
            **losses,
            "tokens": _most_likely(output.masked, batch),
            "orders": output.order.argmax(-1),
        }

    test_step = validation_step

    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Return the most likely tokens and the order logits.

        The tokens (b, s) int64 are -1 at positions where the decoder did not run. ``order_logits``
        is (b, 2).
        """
        output = self(batch)
        return {"tokens": _most_likely(output.masked, batch), "order_logits": output.order}

    def on_validation_batch_end(
        self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add the batch to the metrics, which cover all validation loaders."""
        # Not in validation_step: a pipeline finishes that only on its last stage, once per
        # microbatch.
        self.val_metrics.update(outputs, batch)

    def on_test_batch_end(
        self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add the batch to the metrics, as ``on_validation_batch_end``."""
        self.test_metrics.update(outputs, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics."""
        self._log_metrics("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the metrics."""
        self._log_metrics("test", self.test_metrics)

    def flops_per_sample(self, sequence_length: int | None = None) -> int:
        """Return the model operations, forward and backward, of one training sequence.

        15 % of its tokens are predicted. ``sequence_length=None`` means the longest sequence.
        """
        return bert_flops_per_sample(self.config, sequence_length=sequence_length)

    def _run(self, batch: Batch, *, logits: bool) -> BertOutput:
        arguments = {
            name: batch[name] for name in ("token_type_ids", "attention_mask") if name in batch
        }
        return self.built(
            batch["input_ids"], **arguments, masked_positions=_positions(batch), logits=logits
        )

    def _losses(self, masked: Tensor, order_logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        labels = _labels(batch)
        order_b = cross_entropy(order_logits, batch["next_sentence_label"])
        counted = labels != IGNORED_LABEL
        num_tokens = counted.sum()
        masked_loss = mean_of(masked, num_tokens)
        order_loss = mean_of(order_b.unsqueeze(1) * counted, num_tokens)
        loss = masked_loss + self.order_weight * order_loss
        return {
            "loss": loss,
            "masked_loss": masked_loss,
            "order_loss": order_loss,
            "num_tokens": num_tokens,
        }

    def _log_metrics(self, prefix: str, metrics: _Metrics) -> None:
        for name, metric in metrics.named_children():
            self.log(f"{prefix}_{name}", metric, prog_bar=True)


class _Metrics(torch.nn.Module):
    """Means over all counted tokens or samples of an evaluation.

    They do not depend on the division into batches, microbatches and replicas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanLoss()
        self.masked_loss = MeanLoss()
        self.order_loss = MeanLoss()
        self.masked_accuracy = TokenAccuracy()
        self.order_accuracy = TokenAccuracy()

    def update(self, outputs: Mapping[str, Tensor], batch: Batch) -> None:
        """Add the output of an evaluation step for ``batch``."""
        for name in _LOSSES:
            getattr(self, name).update(outputs[name], outputs["num_tokens"])
        self.masked_accuracy.update(outputs["tokens"], batch["labels"])
        self.order_accuracy.update(outputs["orders"], batch["next_sentence_label"])


def _positions(batch: Batch) -> Tensor | None:
    """Return the positions (b, k) where the decoder runs; None: all positions.

    They are derived from the labels, which are sliced on a rank that holds a part of the sequence.
    The batch determines their number, so that no device is synchronized.
    """
    positions = batch.get("masked_positions")
    labels = batch.get("labels")
    if positions is None or labels is None:
        return positions
    count = min(positions.size(1), labels.size(1))
    return (labels != IGNORED_LABEL).int().argsort(dim=1, descending=True, stable=True)[:, :count]


def _labels(batch: Batch) -> Tensor:
    """Return the labels of the positions where the decoder runs."""
    labels = batch["labels"]
    positions = _positions(batch)
    return labels if positions is None else labels.gather(1, positions)


def _most_likely(logits: Tensor, batch: Batch) -> Tensor:
    """Return the most likely tokens (b, s) at the positions of ``logits``, -1 elsewhere."""
    tokens = logits.argmax(-1)
    positions = _positions(batch)
    if positions is None:
        return tokens
    return tokens.new_full(batch["input_ids"].shape, -1).scatter(1, positions, tokens)
