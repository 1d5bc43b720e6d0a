"""Layers that GPT and BERT share, and a cache of keys and values.

``reset_parameters`` is torch's convention for "draw the initial values again". A module that states
its distribution there can be built eagerly, or on the meta device and filled later. It can be
filled one leaf module at a time under any seed, with the same result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.models.memory_saving import Rotary
from lightning_ptdp.models.model_config import TransformerConfig


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

        The check is for the full sequence, even if forward sees only a part of it.

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
        self.dropout = dropout
        self.is_causal = is_causal

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


class Attention(nn.Module):
    """Self-attention; (b, s, h) -> (b, s, h).

    The output of ``qkv`` determines the number of heads.

    Args:
        config: Sizes and choices.
        is_causal: As in ``AttentionCore``.
        rotary: Rotation of queries and keys by their positions.
    """

    def __init__(
        self, config: TransformerConfig, *, is_causal: bool, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.num_heads // config.kv_heads
        self.qkv = make_linear(config, (config.num_heads + 2 * config.kv_heads) * config.head_dim)
        self.rotary = rotary
        self.core = AttentionCore(config.attention_dropout_rate, is_causal=is_causal)
        self.projection = residual_projection(config, config.num_heads * config.head_dim)

    def forward(
        self,
        x_bsh: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask_b1qs: Tensor | None = None,
    ) -> Tensor:
        # Split into heads after qkv: under sequence parallelism only its output has the whole
        # sequence.
        heads_bsnd = torch.unflatten(self.qkv(x_bsh), -1, (-1, self.head_dim))
        kv_heads = heads_bsnd.size(2) // (self.queries_per_kv + 2)
        if self.rotary is not None:
            heads_bsnd = self.rotary(heads_bsnd, position_ids, turned=heads_bsnd.size(2) - kv_heads)
        q_bsnd, k_bsnd, v_bsnd = heads_bsnd.split(
            (self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2
        )
        if cache is not None:
            k_bsnd, v_bsnd = cache.extend(self, k_bsnd, v_bsnd)
            mask_b1qs = cache.mask_b1qs
        return self.projection(self.core(q_bsnd, k_bsnd, v_bsnd, mask_b1qs).flatten(2))


class GeluMLP(nn.Module):
    """down(gelu(up(x))); (b, s, h) -> (b, s, h). ``approximate`` is the argument of ``F.gelu``."""

    def __init__(self, config: TransformerConfig, *, approximate: str) -> None:
        super().__init__()
        self.up = make_linear(config, config.ffn_size)
        self.down = residual_projection(config, config.ffn_size)
        self.approximate = approximate

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_bsh), approximate=self.approximate))


class _Normal(nn.Module):
    """Layer whose weight starts as normal(0, ``std``) and whose bias starts at zero.

    With ``truncated``, all weights are within two standard deviations of 0. The actual deviation is
    then 0.88 ``std``.
    """

    weight: Tensor

    def __init__(self, *sizes: int, std: float, truncated: bool = False, **options: Any) -> None:
        # before the layer itself, whose constructor calls reset_parameters
        self.std = std
        self.truncated = truncated
        super().__init__(*sizes, **options)

    def reset_parameters(self) -> None:
        """Draw the weight and clear the bias."""
        if self.weight.is_meta:
            return  # torch would take 0.4 ms to draw nothing
        if self.truncated:
            nn.init.trunc_normal_(self.weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        else:
            nn.init.normal_(self.weight, std=self.std)
        bias = getattr(self, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)


class NormalLinear(_Normal, nn.Linear):
    """``nn.Linear`` with normally distributed initial weights."""


class NormalEmbedding(_Normal, nn.Embedding):
    """``nn.Embedding`` with normally distributed initial weights."""


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


def make_embedding(config: TransformerConfig, num_embeddings: int) -> NormalEmbedding:
    """Return an embedding with the initial weights of the configuration."""
    return NormalEmbedding(
        num_embeddings, config.hidden_size, std=config.init_std, truncated=config.truncated_init
    )


def make_linear(config: TransformerConfig, out_features: int) -> NormalLinear:
    """Return a layer that reads from the residual stream."""
    return NormalLinear(
        config.hidden_size,
        out_features,
        bias=config.bias,
        std=config.init_std,
        truncated=config.truncated_init,
    )


def residual_projection(config: TransformerConfig, in_features: int) -> NormalLinear:
    """Return a layer that writes to the residual stream."""
    return NormalLinear(
        in_features,
        config.hidden_size,
        bias=config.bias,
        std=config.residual_std,
        truncated=config.truncated_init,
    )


def positions_of(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the positions of tokens (b, s) in their sequence; None: 0 .. s-1."""
    if position_ids is not None:
        return position_ids
    return torch.arange(input_ids.size(1), device=input_ids.device)


# ---- Cache of keys and values, so that generation computes only the newest token -----------------


class KeyValueCache:
    """Keys and values that attentions keep between forwards, one entry per attention.

    Attributes:
        mask_b1qs: Mask of the s tokens so far that each of the q new tokens sees, bool; ``begin``
            sets it.
    """

    mask_b1qs: Tensor

    def __init__(self) -> None:
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, real_bs: Tensor, new: int) -> None:
        """Prepare a forward of the last ``new`` of s tokens.

        ``real_bs`` (b, s) bool is False for padding. A padding token is visible only to itself.
        """
        positions = torch.arange(real_bs.size(1), device=real_bs.device)
        before = positions <= positions[-new:, None]
        itself = positions == positions[-new:, None]
        self.mask_b1qs = ((before & real_bs[:, None]) | itself)[:, None]

    def extend(self, attention: nn.Module, k_bsnd: Tensor, v_bsnd: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values, and return all that ``attention`` has seen."""
        if attention in self._kept:
            earlier_k, earlier_v = self._kept[attention]
            k_bsnd = torch.cat((earlier_k, k_bsnd), dim=1)
            v_bsnd = torch.cat((earlier_v, v_bsnd), dim=1)
        self._kept[attention] = k_bsnd, v_bsnd
        return k_bsnd, v_bsnd
