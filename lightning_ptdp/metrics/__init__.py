"""Metrics of model quality: loss, perplexity and token accuracy."""

from lightning_ptdp.metrics.token_metrics import MeanLoss, Perplexity, TokenAccuracy

__all__ = ["MeanLoss", "Perplexity", "TokenAccuracy"]
