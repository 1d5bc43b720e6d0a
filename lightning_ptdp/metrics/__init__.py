"""Metrics of model quality: loss, perplexity and token accuracy."""

from lightning_ptdp.metrics.accuracy import TokenAccuracy
from lightning_ptdp.metrics.mean_loss import MeanLoss
from lightning_ptdp.metrics.perplexity import Perplexity

__all__ = ["MeanLoss", "Perplexity", "TokenAccuracy"]
