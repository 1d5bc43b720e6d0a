"""The sizes and choices that make a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_ptdp.option_types import Size, check_types

__all__ = ["GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and layout of a decoder-only transformer; the defaults are GPT-2 small (124 M parameters).

    ``GPTConfig.gpt2(...)`` and ``GPTConfig.llama(...)`` are the two usual sets of choices; every field can be set alone.

    Args:
        vocabulary_size: V, number of token ids.
        sequence_length: Longest sequence that the model takes, in tokens.
        num_layers: l, number of blocks.
        hidden_size: h, width of the residual stream.
        num_heads: Number of attention heads; must divide ``hidden_size``.
        num_kv_heads: Number of key/value heads, shared by equal groups of query heads (GQA, arXiv 2305.13245); None: one
            for each head.
        ffn_hidden_size: f, inner width of the feed-forward part; None: 4h for ``mlp="gelu"``, and for ``mlp="swiglu"`` the
            Llama rule (arXiv 2302.13971, section 2.2): 8h/3 rounded up to a multiple of 256 (of 64 below h = 1024).
        norm: "layer" (LayerNorm) or "rms" (RMSNorm, arXiv 1910.07467).
        position: "learned" (an embedding of the position) or "rope" (rotation of queries and keys, arXiv 2104.09864).
        mlp: "gelu" (tanh approximation, as GPT-2) or "swiglu" (arXiv 2002.05202).
        bias: Biases in the linear layers and in LayerNorm.
        tie_embeddings: The output head uses the token embedding's weight.
        dropout: Probability on the embeddings, the attention weights and the two residual branches.
        init_std: Standard deviation of the initial weights; the two projections that write to the residual stream
            get ``init_std / sqrt(2 l)`` (GPT-2).
        norm_eps: Epsilon of the norms.
        rope_base: Base of the rotary wavelengths.

    Raises:
        ValueError: Sizes that do not fit together; the message names the field and what would work.
    """

    vocabulary_size: Size = 50257
    sequence_length: Size = 1024
    num_layers: Size = 12
    hidden_size: Size = 768
    num_heads: Size = 12
    num_kv_heads: Size | None = None
    ffn_hidden_size: Size | None = None
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tie_embeddings: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0

    @classmethod
    def gpt2(cls, **changes: Any) -> GPTConfig:
        """The GPT-2 layout: LayerNorm, learned positions, GELU, biases, tied head."""
        layout: dict[str, Any] = {"norm": "layer", "position": "learned", "mlp": "gelu", "bias": True, "tie_embeddings": True}
        return cls(**(layout | changes))

    @classmethod
    def llama(cls, **changes: Any) -> GPTConfig:
        """The Llama layout: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own."""
        layout: dict[str, Any] = {"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "tie_embeddings": False}
        return cls(**(layout | changes))

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward part, with the default filled in."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.mlp == "gelu":
            return 4 * self.hidden_size
        multiple = 256 if self.hidden_size >= 1024 else 64
        return -(-8 * self.hidden_size // (3 * multiple)) * multiple

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1; use 0 for none")
        for name in ("init_std", "norm_eps", "rope_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}; use a num_heads of "
                f"{_near(self.hidden_size, self.num_heads)}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}, so that query heads "
                f"cannot share key/value heads equally; use a num_kv_heads of {_near(self.num_heads, self.kv_heads)}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"position='rope' turns pairs of channels, but hidden_size / num_heads = {self.hidden_size} / "
                f"{self.num_heads} = {self.head_dim} is odd; change num_heads or hidden_size, or use position='learned'"
            )


def _near(number: int, wanted: int) -> str:
    # Imported here: a configuration alone needs no layout.
    from lightning_ptdp.world.layout import nearest_divisors

    return ", ".join(str(divisor) for divisor in nearest_divisors(number, wanted))
