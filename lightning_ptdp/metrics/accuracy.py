"""Share of correctly predicted tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["TokenAccuracy"]


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
        self.add_state("correct", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state(
            "num_tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum"
        )

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
