"""GPT: a decoder-only transformer, in the order of data flow.

This is a plain single-device model without process groups or parallel degrees. It is split from
outside (``gpt_plan``), and follows four rules for that:

- Numbers of heads are read from the tensors, so that a rank with fewer heads runs the same code.
- A fused output has the layout [q | k | v] or [gate | up], so that each part can be split
  separately.
- Positions inside a block are counted after the qkv projection. There the whole sequence is present
  even if the block's input is split along the sequence (arXiv 2205.05198, section 4.2.2).
- One tensor passes from block to block. A mixture of experts also passes the sums of the routers'
  auxiliary values (``experts.py``).

Shapes: b samples, s tokens, h hidden channels, n heads, d channels of a head, f inner channels, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_ptdp.models.experts import AUXILIARY, Mixture
from lightning_ptdp.models.layers import (
    AttentionCore,
    GeluMLP,
    KeyValueCache,
    NormalEmbedding,
    NormalLinear,
    RMSNorm,
    TiedLinear,
    Transformer,
    swiglu,
)
from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.models.rotary import Rotary


class GPT(Transformer):
    """GPT with its head: token ids (b, s) int64 -> logits (b, s, V).

    Args:
        config: Sizes and choices.

    Raises:
        ValueError: (in the forward pass) the sequence is longer than ``config.sequence_length``.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte = NormalEmbedding(config.vocabulary_size, config.hidden_size, std=config.init_std)
        self.wpe = None
        if config.position == "learned":
            self.wpe = NormalEmbedding(
                config.sequence_length, config.hidden_size, std=config.init_std
            )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config)
        self.head: nn.Linear
        if config.tie_embeddings:
            self.head = TiedLinear(self.wte.weight)
        else:
            self.head = NormalLinear(
                config.hidden_size, config.vocabulary_size, bias=False, std=config.init_std
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits: bool = True,
        auxiliary: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits (b, s, V) of the token that follows each token of ``input_ids``.

        Args:
            input_ids: Token ids (b, s) int64.
            position_ids: Positions of the tokens in their sequence, (s), (1, s) or (b, s) int64;
                None: 0 .. s-1.
            logits: If False, return the input of the head, (b, s, h), for a loss that calls the
                head (``linear_cross_entropy``).
            auxiliary: Also return the auxiliary values of the routers of a mixture of experts, (b,
                3): balance, z and dropped share of each sequence (``experts.py``), summed over the
                layers.
            cache: Keys and values of the preceding tokens, to which those of these tokens are
                added.
        """
        self.check_sequence_length(input_ids.size(1))
        x_bsh = self.wte(input_ids)
        if self.wpe is not None:
            positions = (
                torch.arange(input_ids.size(1), device=input_ids.device)
                if position_ids is None
                else position_ids
            )
            x_bsh = x_bsh + self.wpe(positions)
        x_bsh = self.dropout(x_bsh)
        aux_b3 = x_bsh.new_zeros(
            x_bsh.size(0), AUXILIARY, dtype=torch.promote_types(x_bsh.dtype, torch.float32)
        )
        for block in self.blocks:
            if self.config.num_experts is None:
                x_bsh = block(x_bsh, position_ids, cache)
            else:
                x_bsh, aux_b3 = block(x_bsh, aux_b3, position_ids, cache)
        x_bsh = self.norm(x_bsh)
        result = self.head(x_bsh) if logits else x_bsh
        return (result, aux_b3) if auxiliary else result

    def balance(self, total: Callable[[Tensor], Tensor]) -> None:
        """Move the routers' biases by the load of their experts since the last call.

        This is for ``balance="bias"``. Collective: ``total`` is called once, with the loads (l, E)
        float64, and returns their sum over the processes (a constant factor does not matter). The
        loads of layers on other ranks are zero.
        """
        routers = {
            layer: block.mixture.router
            for layer, block in enumerate(self.blocks)
            if isinstance(block, MixtureBlock)
        }
        balancers = {
            layer: router.balancer
            for layer, router in routers.items()
            if router.balancer is not None
        }
        device = next(self.parameters()).device
        load = torch.zeros(
            len(self.blocks), self.config.num_experts or 0, dtype=torch.float64, device=device
        )
        for layer, balancer in balancers.items():
            load[layer] = balancer.load
        load = total(load)
        for layer, balancer in balancers.items():
            balancer.move(load[layer])


class Block(nn.Module):
    """Pre-norm residual block; (b, s, h) -> (b, s, h).

    It computes x + attention(norm(x)), then x + mlp(norm(x)). ``layer`` is its number.
    """

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attention = Attention(config)
        self.norm_2 = make_norm(config)
        self._make_feed_forward(config, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_bsh: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        x_bsh = self._attended(x_bsh, position_ids, cache)
        return x_bsh + self.dropout(self.mlp(self.norm_2(x_bsh)))

    def _make_feed_forward(self, config: GPTConfig, layer: int) -> None:
        self.mlp = gelu_mlp(config) if config.mlp == "gelu" else SwiGLU(config, config.ffn_size)

    def _attended(
        self, x_bsh: Tensor, position_ids: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        return x_bsh + self.dropout(self.attention(self.norm_1(x_bsh), position_ids, cache))


class DenseBlock(Block):
    """Layer without experts in a model with experts; (b, s, h), (b, 3) -> the same.

    It passes on the auxiliary values of earlier layers.
    """

    def forward(  # type: ignore[override]
        self,
        x_bsh: Tensor,
        aux_b3: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        return super().forward(x_bsh, position_ids, cache), aux_b3


class MixtureBlock(Block):
    """Block whose feed-forward part is a mixture of experts; (b, s, h), (b, 3) -> the same."""

    def forward(  # type: ignore[override]
        self,
        x_bsh: Tensor,
        aux_b3: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_bsh = self._attended(x_bsh, position_ids, cache)
        y_bsh, layer_aux_b3 = self.mixture(self.norm_2(x_bsh))
        return x_bsh + self.dropout(y_bsh), aux_b3 + layer_aux_b3

    def _make_feed_forward(self, config: GPTConfig, layer: int) -> None:
        shared = (
            SwiGLU(config, config.shared_experts * config.expert_size)
            if config.shared_experts
            else None
        )
        self.mixture = Mixture(config, layer, shared)


def _block(config: GPTConfig, layer: int) -> Block:
    kind = (
        Block
        if config.num_experts is None
        else DenseBlock
        if layer < config.dense_layers
        else MixtureBlock
    )
    return kind(config, layer)


class Attention(nn.Module):
    """Causal self-attention; (b, s, h) -> (b, s, h).

    The output of ``qkv`` determines the number of heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.num_heads // config.kv_heads
        width = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = make_linear(config, width)
        self.rotary = (
            Rotary(config.head_dim, config.rope_base) if config.position == "rope" else None
        )
        self.core = AttentionCore(config.dropout, is_causal=True)
        self.projection = residual_projection(config, config.num_heads * config.head_dim)

    def forward(
        self, x_bsh: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        heads_bsnd = torch.unflatten(self.qkv(x_bsh), -1, (-1, self.head_dim))
        kv_heads = heads_bsnd.size(2) // (self.queries_per_kv + 2)
        if self.rotary is not None:
            heads_bsnd = self.rotary(heads_bsnd, position_ids, turned=heads_bsnd.size(2) - kv_heads)
        q_bsnd, k_bsnd, v_bsnd = heads_bsnd.split(
            (self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2
        )
        if cache is None:
            return self.projection(self.core(q_bsnd, k_bsnd, v_bsnd).flatten(2))
        k_bsnd, v_bsnd = cache.extend(self, k_bsnd, v_bsnd)
        return self.projection(self.core(q_bsnd, k_bsnd, v_bsnd, cache.mask_b1qs).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202) of inner width f; (b, s, h) -> (b, s, h)."""

    def __init__(self, config: GPTConfig, f: int) -> None:
        super().__init__()
        self.gate_up = make_linear(config, 2 * f)
        self.down = residual_projection(config, f)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_bsh)))


def gelu_mlp(config: GPTConfig) -> GeluMLP:
    """Return the feed-forward part of GPT-2."""
    return GeluMLP(
        make_linear(config, config.ffn_size),
        residual_projection(config, config.ffn_size),
        approximate="tanh",
    )


def make_linear(config: GPTConfig, out_features: int) -> NormalLinear:
    """Return a layer that reads from the residual stream."""
    return NormalLinear(config.hidden_size, out_features, bias=config.bias, std=config.init_std)


def make_norm(config: GPTConfig) -> nn.Module:
    """Return the configured norm."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


def residual_projection(config: GPTConfig, in_features: int) -> NormalLinear:
    """Return a layer that writes to the residual stream.

    l blocks add 2l such outputs. Each therefore starts smaller by sqrt(2l).
    """
    std = config.init_std / math.sqrt(2 * config.num_layers)
    return NormalLinear(in_features, config.hidden_size, bias=config.bias, std=std)
