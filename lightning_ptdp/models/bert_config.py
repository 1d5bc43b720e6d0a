"""The sizes and choices that make a BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_ptdp.models.config import TransformerConfig
from lightning_ptdp.option_types import Size

__all__ = ["BertConfig"]


@dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """Sizes and layout of a bidirectional encoder; the defaults are BERT base (110 M parameters, arXiv 1810.04805).

    ``BertConfig.original(...)`` and ``BertConfig.megatron(...)`` are the two usual sets of choices; every field can be set alone.

    Args:
        vocabulary_size: V, number of token ids.
        sequence_length: Longest sequence that the model takes, in tokens, special ones included.
        num_layers: l, number of blocks.
        hidden_size: h, width of the residual stream.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        ffn_hidden_size: f, inner width of the feed-forward part; None: 4h.
        num_segments: Number of token types; a pair of sentences has two.
        norm_order: Where LayerNorm stands: "post", behind the residual sum and behind the embeddings (arXiv 1810.04805), or "pre", in front
            of attention and feed-forward part and behind the last block, which is what trains at 24 layers of h = 2048 and more
            (arXiv 1909.08053, section 5.3, figure 7).
        gelu: "exact" (by the error function) or "tanh" (its approximation).
        dropout: Probability on the embeddings and the residual branches.
        attention_dropout: Probability on the attention weights; None: ``dropout``.
        init_std: Standard deviation of the initial weights.
        truncated_init: Draw no initial weight further than two standard deviations from 0 (the original's code).
        scaled_residual_init: The two projections that write to the residual stream get ``init_std / sqrt(2 l)``
            (arXiv 1909.08053, section 4.2).
        norm_eps: Epsilon of LayerNorm.

    Raises:
        ValueError: Sizes that do not fit together; the message names the field and what would work.
    """

    vocabulary_size: Size = 30522
    sequence_length: Size = 512
    num_segments: Size = 2
    norm_order: Literal["post", "pre"] = "post"
    gelu: Literal["exact", "tanh"] = "exact"
    dropout: float = 0.1
    attention_dropout: float | None = None
    truncated_init: bool = True
    scaled_residual_init: bool = False
    norm_eps: float = 1e-12

    @classmethod
    def original(cls, **changes: Any) -> BertConfig:
        """BERT as published (arXiv 1810.04805): LayerNorm behind the sums, exact GELU, truncated initial weights."""
        return cls(**changes)

    @classmethod
    def megatron(cls, **changes: Any) -> BertConfig:
        """Megatron's BERT (arXiv 1909.08053, section 5.3): LayerNorm in front, GELU by tanh, smaller residual projections."""
        layout = {"norm_order": "pre", "gelu": "tanh", "truncated_init": False, "scaled_residual_init": True, "norm_eps": 1e-5}
        return cls(**{**layout, **changes})

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout of the attention weights, with the default filled in."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout
