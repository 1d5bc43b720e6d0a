"""Perplexity from the loss that training computes anyway."""

from __future__ import annotations

from torch import Tensor

from lightning_ptdp.metrics.mean_loss import MeanLoss

__all__ = ["Perplexity"]

# exp(88) still fits float32, to which loggers and monitors convert.
_LARGEST_EXPONENT = 88.0


class Perplexity(MeanLoss):
    """Perplexity exp(sum of token NLL / number of tokens), over all updates and ranks.

    It is as exact as ``MeanLoss``. The result is capped at exp(88), the largest that float32 can
    hold, and is NaN if no token has been counted or a loss was NaN."""

    def compute(self) -> Tensor:
        """Return the perplexity, a float64 scalar."""
        return super().compute().clamp(max=_LARGEST_EXPONENT).exp()
