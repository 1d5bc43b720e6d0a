"""Metrics of model quality over tokens: loss, perplexity and accuracy.

Batches, microbatches and replicas may count different numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanLoss", "Perplexity", "TokenAccuracy"]


class MeanLoss(Metric):
    """Sum of token NLL / number of tokens, over all updates and ranks.

    The metric takes losses, not logits: under vocabulary parallelism no rank holds all logits. If
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
        for name in ("nll_sum", "num_tokens"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def update(self, nll: Tensor, num_tokens: Tensor | float = 1) -> None:
        """Add losses.

        Args:
            nll: Negative log-likelihoods in nats, any shape: a mean over tokens, or one value per
                token.
            num_tokens: Number of tokens for each element of ``nll``, broadcast to its shape: the
                count of a mean, or a 0/1 mask over tokens. Elements without tokens are left out,
                whatever their value.
        """
        weights = torch.as_tensor(num_tokens, device=nll.device).to(torch.float64).expand(nll.shape)
        losses = nll.detach().to(torch.float64).masked_fill(weights == 0, 0.0)
        self.nll_sum += (losses * weights).sum()
        self.num_tokens += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, a float64 scalar."""
        return self.nll_sum / self.num_tokens


# ---- Perplexity from the loss that training computes anyway --------------------------------------


# exp(88) still fits float32, to which loggers and monitors convert.
_LARGEST_EXPONENT = 88.0


class Perplexity(MeanLoss):
    """Perplexity exp(sum of token NLL / number of tokens), over all updates and ranks.

    It is as exact as ``MeanLoss``. The result is capped at exp(88), the largest that float32 can
    hold, and is NaN if no token has been counted or a loss was NaN."""

    def compute(self) -> Tensor:
        """Return the perplexity, a float64 scalar."""
        return super().compute().clamp(max=_LARGEST_EXPONENT).exp()


# ---- Share of correctly predicted tokens ---------------------------------------------------------


class TokenAccuracy(Metric):
    """Share of counted tokens whose prediction equals the label, over all updates and ranks.

    The result is NaN before the first token.

    Args:
        ignore_index: Label of tokens that do not count.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    correct: Tensor
    num_tokens: Tensor

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        for name in ("correct", "num_tokens"):
            zero = torch.zeros((), dtype=torch.int64)
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add predictions and their labels.

        Predictions are token ids of the shape of ``labels``, or logits with the vocabulary as an
        additional last dimension.

        Raises:
            ValueError: The shapes do not fit.
        """
        if predictions.shape[:-1] == labels.shape and predictions.is_floating_point():
            predictions = predictions.argmax(-1)
        if predictions.shape != labels.shape:
            raise ValueError(
                f"predictions of shape {tuple(predictions.shape)} do not match labels of shape "
                f"{tuple(labels.shape)}. Pass token ids of the same shape, or logits with the "
                "vocabulary as an additional last dimension"
            )
        counted = labels != self.ignore_index
        self.correct += ((predictions == labels) & counted).sum()
        self.num_tokens += counted.sum()

    def compute(self) -> Tensor:
        """Return the share, a float32 scalar in 0 .. 1."""
        return (self.correct.double() / self.num_tokens).float()
