"""Mean loss per token.

Batches, microbatches and replicas may count different numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanLoss"]


class MeanLoss(Metric):
    """Sum of token NLL / number of tokens, over all updates and ranks.

    The metric takes losses, not logits: under vocabulary parallelism no rank holds whole logits. If
    batches or ranks count different numbers of tokens, the average of their losses is wrong. Both
    sums are therefore kept, in float64. All ranks that hold the same replica may be summed, because
    they add the same factor to both sums.

    The result is NaN if no token has been counted or a loss was NaN. (torchmetrics' own
    ``MeanMetric`` leaves out a NaN, or, with ``nan_strategy="disable"``, the weights.)"""

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
            nll: Negative log-likelihoods in nats, any shape: a mean over tokens, or one value per
                token.
            num_tokens: Number of tokens for each element of ``nll``, broadcast to its shape: the
                count behind a mean, or a 0/1 mask over tokens. Elements with no tokens are left
                out, whatever their value.
        """
        weights = torch.as_tensor(num_tokens, device=nll.device).to(torch.float64).expand(nll.shape)
        losses = nll.detach().to(torch.float64).masked_fill(weights == 0, 0.0)
        self.nll_sum += (losses * weights).sum()
        self.num_tokens += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, a float64 scalar."""
        return self.nll_sum / self.num_tokens
