"""The mean loss a token, over batches, microbatches and replicas that count different numbers of
tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanLoss"]


class MeanLoss(Metric):
    """Sum of token NLL / number of tokens, over all updates and ranks.

    Fed by losses, not by logits: these never exist whole on one rank under vocabulary parallelism.
    Averaging the losses of batches or ranks with different numbers of counted tokens gives another,
    wrong number; hence both sums are kept, in float64.
    Ranks that hold the same replica may all be summed: they add the same factor to both sums.

    The result is NaN if no token has been counted or a loss was NaN. (torchmetrics' own
    ``MeanMetric`` leaves a NaN out, or, with ``nan_strategy="disable"``, the weights.)"""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    nll_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state(
            "nll_sum", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "num_tokens", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )

    def update(self, nll: Tensor, num_tokens: Tensor | float = 1) -> None:
        """Add losses.

        Args:
            nll: Negative log-likelihoods in nats, any shape: a mean over tokens, or one value a
                token.
            num_tokens: Number of tokens that each element of ``nll`` stands for, broadcast to its
                shape: the count behind a mean, or a 0/1 mask over tokens. Elements that stand for
                no token are left out, whatever their value.
        """
        weights = torch.as_tensor(num_tokens, device=nll.device).to(torch.float64).expand(nll.shape)
        losses = nll.detach().to(torch.float64).masked_fill(weights == 0, 0.0)
        self.nll_sum += (losses * weights).sum()
        self.num_tokens += weights.sum()

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        return self.nll_sum / self.num_tokens
