"""Leaf modules that know their own initial distribution.

``reset_parameters`` is torch's convention for "draw the initial values again". A module that states its distribution there can
be built eagerly, or on the meta device and filled later, one leaf at a time under any seed, with the same result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NormalEmbedding", "NormalLinear", "TiedLinear"]


class NormalLinear(nn.Linear):
    """``nn.Linear`` whose weight starts as normal(0, ``std``) and whose bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, **kwargs: Any) -> None:
        self.std = std  # before the base class, whose constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias, **kwargs)

    def reset_parameters(self) -> None:
        """Draw the weight, clear the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight starts as normal(0, ``std``)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float, **kwargs: Any) -> None:
        self.std = std  # before the base class, whose constructor calls reset_parameters
        super().__init__(num_embeddings, embedding_dim, **kwargs)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=self.std)


class TiedLinear(nn.Linear):
    """``nn.Linear`` without bias on another module's weight (out, in); that module alone initializes it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.size(1), weight.size(0), bias=False, device=torch.device("meta"))
        self.weight = weight

    def reset_parameters(self) -> None:
        """Nothing: the weight is its owner's, and drawing it twice would make its value depend on the order."""
