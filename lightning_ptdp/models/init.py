"""Leaf modules that know their own initial distribution.

``reset_parameters`` is torch's convention for "draw the initial values again". A module that states its distribution there can
be built eagerly, or on the meta device and filled later, one leaf at a time under any seed, with the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NormalEmbedding", "NormalLinear", "TiedLinear"]


class NormalLinear(nn.Linear):
    """``nn.Linear`` whose weight starts as normal(0, ``std``) and whose bias starts at zero.

    With ``truncated`` no weight is further than two standard deviations from 0, which makes the deviation 0.88 ``std``.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, truncated: bool = False) -> None:
        self.std, self.truncated = std, truncated  # before the base class, whose constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight, clear the bias."""
        _draw(self.weight, self.std, self.truncated)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight starts as normal(0, ``std``), ``truncated`` as in ``NormalLinear``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float, truncated: bool = False) -> None:
        self.std, self.truncated = std, truncated  # before the base class, whose constructor calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        _draw(self.weight, self.std, self.truncated)


class TiedLinear(nn.Linear):
    """``nn.Linear`` on another module's weight (out, in), which that module alone initializes; a bias is its own and starts at zero."""

    def __init__(self, weight: Tensor, *, bias: bool = False) -> None:
        super().__init__(weight.size(1), weight.size(0), bias=False, device=torch.device("meta"))
        self.weight = weight
        if bias:
            self.bias = nn.Parameter(torch.zeros(weight.size(0)))

    def reset_parameters(self) -> None:
        """Clear the bias. Drawing the weight twice would make its value depend on the order."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _draw(weight: Tensor, std: float, truncated: bool) -> None:
    if truncated:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        nn.init.normal_(weight, std=std)
