"""Perplexity from the loss that training computes anyway."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["Perplexity"]

# exp(88) still fits float32, which loggers and monitors convert to.
_LARGEST_EXPONENT = 88.0


class Perplexity(Metric):
    """exp(sum of token NLL / number of tokens), over all updates and ranks.

    Fed by losses, not by logits: these never exist whole on one rank under vocabulary parallelism. Averaging the losses of
    batches or ranks with different numbers of counted tokens gives another, wrong number; hence both sums are kept, in float64.
    Ranks that hold the same replica may all be summed: they add the same factor to both sums.

    The result is capped at exp(88), the largest that float32 can hold, and is NaN if no token has been counted or a loss was NaN.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    nll_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll_sum", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_tokens", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, num_tokens: Tensor | float = 1) -> None:
        """Add losses.

        Args:
            nll: Negative log-likelihoods in nats, any shape: a mean over tokens, or one value a token.
            num_tokens: Number of tokens that each element of ``nll`` stands for, broadcast to its shape: the count behind a mean,
                or a 0/1 mask over tokens. Elements that stand for no token are left out, whatever their value.
        """
        weights = torch.as_tensor(num_tokens, device=nll.device).to(torch.float64).expand(nll.shape)
        losses = nll.detach().to(torch.float64).masked_fill(weights == 0, 0.0)
        self.nll_sum += (losses * weights).sum()
        self.num_tokens += weights.sum()

    def compute(self) -> Tensor:
        """The perplexity, a float64 scalar."""
        return (self.nll_sum / self.num_tokens).clamp(max=_LARGEST_EXPONENT).exp()
