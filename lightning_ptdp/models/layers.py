"""What the transformers here have in common."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.models.config import TransformerConfig

__all__ = ["AttentionCore", "GeluMLP", "Transformer"]


class Transformer(nn.Module):
    """A model of limited length.

    Args:
        config: Sizes and choices.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def check_sequence_length(self, length: int) -> None:
        """Check that a sequence of ``length`` tokens is not too long; asked of the whole sequence where forward sees a part of it.

        Raises:
            ValueError: It is longer than ``config.sequence_length``.
        """
        if length > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than sequence_length={self.config.sequence_length}; "
                "cut it, or build the model with a greater sequence_length"
            )


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d)) v; q (b, s, n, d), k and v (b, s, n_kv, d) -> (b, s, n, d).

    A module of its own, without parameters, so that what it keeps can be recomputed alone (``recompute="selective"``).

    Args:
        dropout: Probability on the attention weights.
        is_causal: A token sees itself and what is before it; else all keys that a mask (b, 1, 1, s) admits.
    """

    def __init__(self, dropout: float, *, is_causal: bool) -> None:
        super().__init__()
        self.dropout, self.is_causal = dropout, is_causal

    def forward(self, q_bsnd: Tensor, k_bsnd: Tensor, v_bsnd: Tensor, mask_b11s: Tensor | None = None) -> Tensor:
        y_bnsd = F.scaled_dot_product_attention(
            q_bsnd.transpose(1, 2),
            k_bsnd.transpose(1, 2),
            v_bsnd.transpose(1, 2),
            attn_mask=mask_b11s,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            enable_gqa=q_bsnd.size(2) != k_bsnd.size(2),
        )
        return y_bnsd.transpose(1, 2)


class GeluMLP(nn.Module):
    """down(gelu(up(x))); (b, s, h) -> (b, s, h). ``approximate`` as of ``F.gelu``."""

    def __init__(self, up: nn.Linear, down: nn.Linear, *, approximate: str) -> None:
        super().__init__()
        self.up, self.down, self.approximate = up, down, approximate

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_bsh), approximate=self.approximate))
