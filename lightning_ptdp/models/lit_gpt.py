"""GPT as a LightningModule: loss and logging.

Nothing here depends on the parallel layout.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.models.gpt import GPT, gpt_plan
from lightning_ptdp.models.lit_tokens import (
    DEFAULT_OPTIMIZER,
    IGNORED_LABEL,
    Batch,
    LitTokens,
    LitTransformer,
)
from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.models.optimizer_setup import AdamWConfig
from lightning_ptdp.models.size import flops_per_sample
from lightning_ptdp.tensor_parallel import DEFAULT_CHUNK_MB, ParallelPlan
from lightning_ptdp.world.layout import ParallelLayout


class LitGPT(LitTransformer, LitTokens):
    """Language modelling with a GPT.

    A batch is a mapping with ``input_ids`` (b, s) int64 and ``labels`` (b, s) int64. A label is the
    token that follows the input token (already shifted), or -100 where no token is predicted. The
    loss is the mean over the counted tokens.

    Logs ``train_loss`` in each step. With experts, it also logs ``train_balance_loss``,
    ``train_z_loss`` and, with a capacity, ``train_dropped_share``. These are means over the layers
    with experts and over the counted tokens, each with the value of its sequence. In each epoch, it
    logs ``val_loss`` and ``val_perplexity``, or ``test_loss``.

    Args:
        config: Configuration of the model.
        optimizer: AdamW and its schedule.
        loss_chunk_mb: Maximum MiB of float32 logits that the loss holds at a time. Larger logits
            are computed in chunks, twice (``linear_cross_entropy``).
    """

    model_class = GPT
    config_class = GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        optimizer: AdamWConfig = DEFAULT_OPTIMIZER,
        loss_chunk_mb: float = DEFAULT_CHUNK_MB,
    ) -> None:
        super().__init__(config, optimizer, loss_chunk_mb)

    def configure_parallel(self) -> ParallelPlan:
        """Return the plan by which the model is split."""
        return gpt_plan(self.config, prefix="model")

    def check_parallel(self, layout: ParallelLayout) -> None:
        """Refuse a layout that cannot split heads, feed-forward part or experts.

        Called before launch.

        Raises:
            ValueError: As for ``check_tensor_parallel``, or the capacity of an expert would have to
                be counted over several ranks.
        """
        super().check_parallel(layout)
        if self.config.capacity_factor is not None and layout.context_parallel_size > 1:
            raise ValueError(
                f"capacity_factor={self.config.capacity_factor} does not work with "
                f"context_parallel_size={layout.context_parallel_size}, because an expert's "
                "capacity for a token depends on all earlier tokens of the sequence, which "
                "are on several ranks. Use context_parallel_size=1, or capacity_factor=None"
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits (b, s, V) of token ids (b, s)."""
        return self.built(input_ids)

    def flops_per_sample(self, sequence_length: int | None = None) -> int:
        """Return the model operations, forward and backward, of one training sequence.

        ``sequence_length=None`` means the longest sequence.
        """
        return flops_per_sample(self.config, sequence_length=sequence_length)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss and its number of tokens.

        With experts, every counted token adds the balancing and z loss of its sequence.
        """
        losses_bs, aux_b3 = self._losses(batch)
        step = self.mean_loss(losses_bs, batch, "train_loss")
        if self.config.num_experts is None:
            return step
        counted_bs = (batch["labels"] != IGNORED_LABEL).to(aux_b3.dtype)
        sums = torch.einsum("bs,bk->k", counted_bs, aux_b3)
        balance, square, _ = means = sums / step["num_tokens"].clamp(min=1)
        names = (
            ("balance_loss", "z_loss")
            if self.config.capacity_factor is None
            else ("balance_loss", "z_loss", "dropped_share")
        )
        for name, mean in zip(names, means / self.config.layers_with_experts, strict=False):
            self.log(f"train_{name}", mean)
        auxiliary = self.config.z_loss_coefficient * square
        if self.config.balance == "loss":
            auxiliary = auxiliary + self.config.balance_coefficient * balance
        return {**step, "loss": step["loss"] + auxiliary}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Move the biases of routers with ``balance="bias"``, once per optimizer step."""
        if self.config.num_experts is not None and self.config.balance == "bias":
            self.built.balance(
                partial(self.trainer.strategy.reduce, group=dist.group.WORLD, reduce_op="sum")
            )

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden_bsh, aux_b3 = self.built(batch["input_ids"], logits=False, auxiliary=True)
        return self.losses_of(hidden_bsh, self.built.head, batch["labels"]), aux_b3
