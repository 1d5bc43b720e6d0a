"""The sizes and choices that make a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_ptdp.models.config import TransformerConfig, near
from lightning_ptdp.option_types import Size

__all__ = ["GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
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
    num_kv_heads: Size | None = None
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tie_embeddings: bool = True
    rope_base: float = 10_000.0

    @classmethod
    def gpt2(cls, **changes: Any) -> GPTConfig:
        """The GPT-2 layout: LayerNorm, learned positions, GELU, biases, tied head."""
        return cls(**changes)

    @classmethod
    def llama(cls, **changes: Any) -> GPTConfig:
        """The Llama layout: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own."""
        layout: dict[str, Any] = {"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "tie_embeddings": False}
        return cls(**(layout | changes))

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward part, with the default filled in."""
        if self.ffn_hidden_size is not None or self.mlp == "gelu":
            return super().ffn_size
        multiple = 256 if self.hidden_size >= 1024 else 64
        return -(-8 * self.hidden_size // (3 * multiple)) * multiple

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}, so that query heads "
                f"cannot share key/value heads equally; use a num_kv_heads of {near(self.num_heads, self.kv_heads)}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"position='rope' turns pairs of channels, but hidden_size / num_heads = {self.hidden_size} / "
                f"{self.num_heads} = {self.head_dim} is odd; change num_heads or hidden_size, or use position='learned'"
            )
