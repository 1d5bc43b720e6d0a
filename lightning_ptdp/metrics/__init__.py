"""What is measured: quality of the model (perplexity, token accuracy) and the work that a step is (operations, parameters)."""

from lightning_ptdp.metrics.accuracy import TokenAccuracy
from lightning_ptdp.metrics.flops import (
    matmul_flops_per_token,
    training_flops_per_token,
)
from lightning_ptdp.metrics.mean_loss import MeanLoss
from lightning_ptdp.metrics.perplexity import Perplexity

__all__ = [
    "MeanLoss",
    "Perplexity",
    "TokenAccuracy",
    "matmul_flops_per_token",
    "training_flops_per_token",
]
