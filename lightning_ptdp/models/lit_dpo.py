"""Direct preference optimization (DPO, arXiv 2305.18290) of Hugging Face language models.

Nothing here depends on the parallel layout.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.forward.frozen_forward import Within, frozen_forward, initial_values
from lightning_ptdp.models.lit_huggingface import LitCausalLM
from lightning_ptdp.models.lit_tokens import IGNORED_LABEL, Batch
from lightning_ptdp.shims.peft import adapters_off

Reference: TypeAlias = Literal["auto", "adapters_off", "copy", "precomputed"]

_ANSWERS = ("chosen", "rejected")
_REFERENCES = ("reference_chosen_logps", "reference_rejected_logps")


class LitDPO(LitCausalLM):
    """Preference tuning of any ``AutoModelForCausalLM`` on pairs of answers.

    A batch is a mapping with ``chosen_ids``, ``chosen_labels``, ``rejected_ids`` and
    ``rejected_labels``, each (b, s) int64. A row of all four is a pair. Labels are as in
    ``LitCausalLM``, and -100 outside of the answer.

    Let r be the log-probability of an answer minus that of the reference. The loss of a pair is
    -log sigmoid(beta (r_chosen - r_rejected)), and that of a step is the mean over pairs. The
    reference is the model as it was before this training. Its log-probabilities are computed before
    a step, by a forward without gradients and without dropout.

    Logs ``train_loss``, ``rewards/chosen`` and ``rewards/rejected`` (beta r), ``rewards/margins``
    (their difference) and ``rewards/accuracies`` (share of pairs with a positive one). Validation
    logs ``val_loss`` and ``val_rewards/…``.

    Args:
        path: A folder with ``config.json`` (and the weights, as safetensors), or the name of a
            model on the hub.
        beta: Strength of the penalty that keeps the model close to the reference.
        label_smoothing: Assumed share of pairs whose labels are wrong (conservative DPO), at least
            0 and less than 0.5.
        reference: ``adapters_off`` computes the reference with the adapters switched off, which
            takes no memory. ``copy`` keeps a second, frozen set of the values that are trained.
            ``precomputed`` computes the log-probabilities of all pairs once, when training starts;
            it needs a ``PreferenceDataModule``. "auto": ``adapters_off`` with an adapter, otherwise
            ``copy``.
        kwargs: Further arguments of ``LitCausalLM``.

    Raises:
        ValueError: A value is out of range, or ``adapters_off`` would not give the original model.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        reference: Reference = "auto",
        **kwargs: Any,
    ) -> None:
        check_arguments(LitDPO.__init__, {"reference": reference})
        super().__init__(path, **kwargs)
        if beta <= 0:
            raise ValueError(f"beta={beta} must be positive")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={label_smoothing} must be at least 0 and less than 0.5"
            )
        if reference == "auto":
            reference = "copy" if self.adapter is None else "adapters_off"
        if reference == "adapters_off":
            if self.adapter is None:
                raise ValueError(
                    "reference='adapters_off' needs adapters. Set model.adapter, or use "
                    "reference='copy' or 'precomputed'"
                )
            if self.adapter.bias != "none":
                raise ValueError(
                    f"reference='adapters_off' with adapter.bias={self.adapter.bias!r} would not "
                    "be the original model, because its biases are trained. Use bias='none' or "
                    "reference='copy'"
                )
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.reference = reference
        self.save_hyperparameters("beta", "label_smoothing", "reference")
        # a resumed training still needs the values from before
        self.needs_initial_values = reference != "adapters_off"
        self._within: Within | None = None
        self._known: dict[str, Tensor] = {}

    # ---- the reference ---------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Keep the reference, before a checkpoint is restored.

        Raises:
            ValueError: The strategy restores checkpoints before this hook.
        """
        trainer = self.trainer
        if not self.needs_initial_values:
            return
        if trainer.ckpt_path is not None and not trainer.strategy.restore_checkpoint_after_setup:
            raise ValueError(
                f"reference={self.reference!r} needs the weights from before the checkpoint, which "
                f"{type(trainer.strategy).__name__} has already replaced. Resume with "
                "Trainer(strategy='ptdp')"
            )
        if self.reference == "copy":
            self._within = initial_values(self)
        else:
            self._precompute()

    def _precompute(self) -> None:
        """Compute the log-probabilities of all pairs, each on one replica; collective."""
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        self.check_data(datamodule)
        strategy = self.trainer.strategy
        for split, loader in datamodule.numbered_pairs().items():
            size = len(loader.stream)
            rank_zero_info(f"computing the reference's log-probabilities of {size:,} {split} pairs")
            known: Tensor | None = None
            for number, batch in enumerate(loader):
                batch = strategy.batch_to_device(batch)
                logps = torch.stack([*frozen_forward(self, batch, number).values()], 1)
                if known is None:
                    # one row more for the pairs that fill up batches, whose number is -1
                    known = logps.new_zeros(size + 1, 2)
                known[batch["pair"]] = logps
            self._known[split] = strategy.reduce(known, reduce_op="sum")

    def check_data(self, datamodule: object) -> None:
        """Check the data before launch, as ``LitCausalLM`` does.

        Raises:
            ValueError: The data do not fit the model, or do not number their pairs.
        """
        super().check_data(datamodule)
        if self.reference == "precomputed" and not hasattr(datamodule, "numbered_pairs"):
            raise ValueError(
                f"reference='precomputed' needs a PreferenceDataModule, not "
                f"{type(datamodule).__name__}. Use reference='copy' for other data"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Add the reference's log-probabilities to the batch."""
        self._add_reference(batch, batch_idx, "train")

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add the reference's log-probabilities to the batch."""
        self._add_reference(batch, batch_idx)

    on_test_batch_start = on_validation_batch_start

    def _add_reference(
        self, batch: MutableMapping[str, Tensor], batch_idx: int, split: str = "validation"
    ) -> None:
        within = self._within
        if self.reference == "adapters_off":
            within = partial(adapters_off, self.model)
        if split in self._known:
            logps = self._known[split][batch["pair"]].unbind(1)
        elif within is not None:
            logps = frozen_forward(self, batch, batch_idx, within=within).values()
        else:
            raise ValueError(
                f"reference={self.reference!r} is known only while training. Validate in fit, or "
                "train adapters with reference='adapters_off'"
            )
        batch.update(zip(_REFERENCES, logps, strict=True))

    # ---- steps -----------------------------------------------------------------------------------

    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        """Return the log-probabilities of the answers.

        ``chosen_logps`` and ``rejected_logps`` are (b) float32.
        """
        losses_2b = self.token_losses(batch)
        return {f"{name}_logps": -part for name, part in zip(_ANSWERS, losses_2b, strict=True)}

    def summarize_predictions(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the result of ``predict_step``."""
        return dict(outputs)

    def on_validation_batch_end(
        self, outputs: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Do nothing: pairs have no perplexity."""

    def on_validation_epoch_end(self) -> None:
        """Do nothing: pairs have no perplexity."""

    def flops_per_sample(self, sequence_length: int) -> int:
        """Return the model operations of a pair, including the reference's forward."""
        sequences = 2 * super().flops_per_sample(sequence_length)
        return sequences if self.reference == "precomputed" else sequences * 4 // 3

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the negative log-probabilities (2, b) of the answers, and a balancing loss.

        One forward computes both: under a pipeline, a step calls the model once.
        """
        both = {
            "input_ids": torch.cat([batch[f"{name}_ids"] for name in _ANSWERS]),
            "labels": torch.cat([batch[f"{name}_labels"] for name in _ANSWERS]),
        }
        losses, balance = super()._losses(both)
        # With a third dimension, context parallelism sums over the full sequence.
        return losses.unsqueeze(-1).sum(1).view(2, -1), balance

    def mean_loss(
        self, losses_bs: Tensor, batch: Batch, name: str, *, sync_dist: bool = False
    ) -> dict[str, Tensor]:
        """Return the mean loss and the number of pairs, and log the rewards.

        The number has the name ``num_tokens``, which weights microbatches and replicas.

        Args:
            losses_bs: Negative log-probabilities of the answers, (2, b).
            batch: The batch, with the reference's log-probabilities.
            name: Name of the loss in the log.
            sync_dist: True in evaluation.
        """
        chosen, rejected = (
            -self.beta * (losses + batch[reference])
            for losses, reference in zip(losses_bs, _REFERENCES, strict=True)
        )
        margins = chosen - rejected
        losses = -F.logsigmoid(margins)
        if self.label_smoothing:
            # (1 - e) f(x) + e f(-x) = f(x) + e x for f(x) = -log sigmoid(x)
            losses = losses + self.label_smoothing * margins
        # evaluation fills up its batches with pairs without labels
        counted = (batch["chosen_labels"] != IGNORED_LABEL).unsqueeze(-1).sum(1).squeeze(-1) > 0
        count = counted.sum()

        def mean(values: Tensor) -> Tensor:
            return torch.where(counted, values, 0.0).sum() / count.clamp(min=1)

        loss = mean(losses)
        prefix = name.removesuffix("loss") if sync_dist else ""
        rewards = {
            "chosen": chosen,
            "rejected": rejected,
            "margins": margins,
            "accuracies": (margins > 0).float(),
        }
        values = {f"{prefix}rewards/{key}": mean(each.detach()) for key, each in rewards.items()}
        options: Any = {"sync_dist": sync_dist, "batch_size": len(counted) if sync_dist else None}
        self.log(name, loss, prog_bar=True, **options)
        self.log_dict(values, **options)
        return {"loss": loss, "num_tokens": count}
