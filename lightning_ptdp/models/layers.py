"""Layers of this package's transformers.

``reset_parameters`` is torch's convention for "draw the initial values again". A module that states
its distribution there can be built eagerly, or on the meta device and filled later. It can be
filled one leaf module at a time under any seed, with the same result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.models.model_config import TransformerConfig

__all__ = [
    "AttentionCore",
    "GeluMLP",
    "NormalEmbedding",
    "NormalLinear",
    "TiedLinear",
    "Transformer",
]


class Transformer(nn.Module):
    """A model with a maximum sequence length.

    Args:
        config: Sizes and choices.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def check_sequence_length(self, length: int) -> None:
        """Check that a sequence of ``length`` tokens is not too long.

        The check is for the whole sequence, even if forward sees only a part of it.

        Raises:
            ValueError: It is longer than ``config.sequence_length``.
        """
        if length > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than "
                f"sequence_length={self.config.sequence_length}. Truncate it, or build the "
                "model with a greater sequence_length"
            )


class AttentionCore(nn.Module):
    """Attention without projections: softmax(q k^T / sqrt(d)) v.

    q (b, q, n, d), k and v (b, s, n_kv, d) -> (b, q, n, d).

    It is a module of its own, without parameters, so that it can be recomputed alone
    (``recompute="selective"``).

    Args:
        dropout: Probability on the attention weights.
        is_causal: Without a mask, a token sees itself and the tokens before it. Otherwise it sees
            all keys that a mask (b, 1, 1 or q, s) admits.
    """

    def __init__(self, dropout: float, *, is_causal: bool) -> None:
        super().__init__()
        self.dropout, self.is_causal = dropout, is_causal

    def forward(
        self, q_bsnd: Tensor, k_bsnd: Tensor, v_bsnd: Tensor, mask_b1qs: Tensor | None = None
    ) -> Tensor:
        y_bnsd = F.scaled_dot_product_attention(
            q_bsnd.transpose(1, 2),
            k_bsnd.transpose(1, 2),
            v_bsnd.transpose(1, 2),
            attn_mask=mask_b1qs,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal and mask_b1qs is None,
            enable_gqa=q_bsnd.size(2) != k_bsnd.size(2),
        )
        return y_bnsd.transpose(1, 2)


class GeluMLP(nn.Module):
    """down(gelu(up(x))); (b, s, h) -> (b, s, h). ``approximate`` is the argument of ``F.gelu``."""

    def __init__(self, up: nn.Linear, down: nn.Linear, *, approximate: str) -> None:
        super().__init__()
        self.up, self.down, self.approximate = up, down, approximate

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_bsh), approximate=self.approximate))


class NormalLinear(nn.Linear):
    """``nn.Linear`` whose weight starts as normal(0, ``std``) and whose bias starts at zero.

    With ``truncated``, all weights are within two standard deviations of 0. The actual deviation is
    then 0.88 ``std``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        truncated: bool = False,
    ) -> None:
        # before the base class, whose constructor calls reset_parameters
        self.std, self.truncated = (
            std,
            truncated,
        )
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight and clear the bias."""
        _draw(self.weight, self.std, self.truncated)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """``nn.Embedding`` whose weight starts as normal(0, ``std``).

    ``truncated`` has the same meaning as in ``NormalLinear``.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, std: float, truncated: bool = False
    ) -> None:
        # before the base class, whose constructor calls reset_parameters
        self.std, self.truncated = (
            std,
            truncated,
        )
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        _draw(self.weight, self.std, self.truncated)


class TiedLinear(nn.Linear):
    """``nn.Linear`` that uses another module's weight (out, in).

    Only the other module initializes the weight. A bias is its own and starts at zero.
    """

    def __init__(self, weight: Tensor, *, bias: bool = False) -> None:
        super().__init__(weight.size(1), weight.size(0), bias=False, device=torch.device("meta"))
        self.weight = weight
        if bias:
            self.bias = nn.Parameter(torch.zeros(weight.size(0)))

    def reset_parameters(self) -> None:
        """Clear the bias.

        The weight is not drawn here: a second draw would make its value depend on the order of
        modules.
        """
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _draw(weight: Tensor, std: float, truncated: bool) -> None:
    if truncated:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        nn.init.normal_(weight, std=std)
