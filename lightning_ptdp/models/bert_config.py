"""The sizes and choices that make a BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_ptdp.option_types import Size, check_types

__all__ = ["BertConfig"]


@dataclass(frozen=True, kw_only=True)
class BertConfig:
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
    num_layers: Size = 12
    hidden_size: Size = 768
    num_heads: Size = 12
    ffn_hidden_size: Size | None = None
    num_segments: Size = 2
    norm_order: Literal["post", "pre"] = "post"
    gelu: Literal["exact", "tanh"] = "exact"
    dropout: float = 0.1
    attention_dropout: float | None = None
    init_std: float = 0.02
    truncated_init: bool = True
    scaled_residual_init: bool = False
    norm_eps: float = 1e-12

    @classmethod
    def original(cls, **changes: Any) -> BertConfig:
        """BERT as published (arXiv 1810.04805): LayerNorm behind the sums, exact GELU, truncated initial weights."""
        layout = {"norm_order": "post", "gelu": "exact", "truncated_init": True, "scaled_residual_init": False, "norm_eps": 1e-12}
        return cls(**{**layout, **changes})

    @classmethod
    def megatron(cls, **changes: Any) -> BertConfig:
        """Megatron's BERT (arXiv 1909.08053, section 5.3): LayerNorm in front, GELU by tanh, smaller residual projections."""
        layout = {"norm_order": "pre", "gelu": "tanh", "truncated_init": False, "scaled_residual_init": True, "norm_eps": 1e-5}
        return cls(**{**layout, **changes})

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward part, with the default filled in."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout of the attention weights, with the default filled in."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value} must be at least 0 and below 1; use 0 for none")
        for name in ("init_std", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        if self.hidden_size % self.num_heads:
            # Imported here: a configuration alone needs no layout.
            from lightning_ptdp.world.layout import nearest_divisors

            near = ", ".join(str(divisor) for divisor in nearest_divisors(self.hidden_size, self.num_heads))
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}; use a num_heads of {near}"
            )
