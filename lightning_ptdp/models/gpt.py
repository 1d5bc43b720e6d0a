"""GPT: a decoder-only transformer, in the order of data flow.

This is a plain single-device model without process groups or parallel degrees. It is split from
outside (``gpt_plan``), and follows four rules for that:

- Numbers of heads are read from the tensors, so that a rank with fewer heads runs the same code.
- A fused output has the layout [q | k | v] or [gate | up], so that each part can be split
  separately.
- Positions inside a block are counted after the qkv projection. There the full sequence is
  available even if the block's input is split along the sequence (arXiv 2205.05198, section 4.2.2).
- One tensor passes from block to block. A mixture of experts also passes the sums of the routers'
  auxiliary values (``experts.py``).

Shapes: b samples, s tokens, h hidden channels, n heads, d channels of a head, f inner channels, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_ptdp.models.experts import AUXILIARY, Balancer, Mixture
from lightning_ptdp.models.layers import (
    Attention,
    GeluMLP,
    KeyValueCache,
    NormalLinear,
    TiedLinear,
    Transformer,
    make_embedding,
    make_linear,
    positions_of,
    residual_projection,
)
from lightning_ptdp.models.memory_saving import RMSNorm, Rotary, swiglu
from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.tensor_parallel import (
    Column,
    Experts,
    Kind,
    ParallelPlan,
    PerCopy,
    Position,
    Row,
    Vocabulary,
    Whole,
)


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
        self.wte = make_embedding(config, config.vocabulary_size)
        self.wpe = None
        if config.position == "learned":
            self.wpe = make_embedding(config, config.sequence_length)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
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
            x_bsh = x_bsh + self.wpe(positions_of(input_ids, position_ids))
        x_bsh = self.dropout(x_bsh)
        aux_b3 = x_bsh.new_zeros(
            x_bsh.size(0), AUXILIARY, dtype=torch.promote_types(x_bsh.dtype, torch.float32)
        )
        for block in self.blocks:
            if self.config.num_experts is None:
                x_bsh = block(x_bsh, None, position_ids, cache)
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
        balancers = {
            layer: module
            for layer, block in enumerate(self.blocks)
            for module in block.modules()
            if isinstance(module, Balancer)
        }
        device = next(self.parameters()).device
        load = torch.zeros(
            len(self.blocks), self.config.num_experts or 0, dtype=torch.float64, device=device
        )
        for layer, balancer in balancers.items():
            if balancer.load is not None:
                load[layer] = balancer.load
        load = total(load)
        for layer, balancer in balancers.items():
            balancer.move(load[layer])


class Block(nn.Module):
    """Pre-norm residual block; (b, s, h) -> (b, s, h).

    It computes x + attention(norm(x)), then x + mlp(norm(x)) or x + mixture(norm(x)). In a model
    with experts, the auxiliary values (b, 3) of earlier layers pass through every block, and a
    mixture adds its own; (b, s, h), (b, 3) -> the same. ``layer`` is its number.
    """

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.norm_1 = make_norm(config)
        rotary = Rotary(config.head_dim, config.rope_base) if config.position == "rope" else None
        self.attention = Attention(config, is_causal=True, rotary=rotary)
        self.norm_2 = make_norm(config)
        self.has_experts = config.has_experts and layer >= config.dense_layers
        if self.has_experts:
            shared_size = config.shared_experts * config.expert_size
            shared = SwiGLU(config, shared_size) if shared_size else None
            self.mixture = Mixture(config, layer, shared)
        elif config.mlp == "gelu":
            self.mlp: nn.Module = GeluMLP(config, approximate="tanh")
        else:
            self.mlp = SwiGLU(config, config.ffn_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_bsh: Tensor,
        aux_b3: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_bsh = x_bsh + self.dropout(self.attention(self.norm_1(x_bsh), position_ids, cache))
        if not self.has_experts:
            x_bsh = x_bsh + self.dropout(self.mlp(self.norm_2(x_bsh)))
            return x_bsh if aux_b3 is None else (x_bsh, aux_b3)
        y_bsh, layer_aux_b3 = self.mixture(self.norm_2(x_bsh))
        return x_bsh + self.dropout(y_bsh), aux_b3 + layer_aux_b3


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202) of inner width f; (b, s, h) -> (b, s, h)."""

    def __init__(self, config: GPTConfig, f: int) -> None:
        super().__init__()
        self.gate_up = make_linear(config, 2 * f)
        self.down = residual_projection(config, f)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_bsh)))


def make_norm(config: GPTConfig) -> nn.Module:
    """Return the configured norm."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


# ---- Plan of the model ---------------------------------------------------------------------------
#
# It names the layers that are split over the tensor-parallel ranks, and the blocks of the pipeline.
# As in Megatron-LM (arXiv 1909.08053, section 3), the first matrix of each half block is split by
# output columns, the second by input rows. A half block therefore needs one all-reduce in each
# direction. Embedding and head are split along the vocabulary.


def gpt_plan(config: GPTConfig, prefix: str = "model") -> ParallelPlan:
    """Return the plan of a ``GPT(config)`` with the name ``prefix`` ("" if it is the root)."""
    root = f"{prefix}." if prefix else ""
    block = f"{root}blocks.*"
    q_width = config.num_heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    heads = (config.num_heads, config.kv_heads, config.kv_heads)
    positions = {f"{root}wpe": Position()} if config.position == "learned" else {}
    tensor: dict[str, Kind] = {
        f"{root}wte": Vocabulary(),
        **positions,
        f"{block}.attention.qkv": Column(
            parts=(q_width, kv_width, kv_width), heads=heads, copy_heads=True
        ),
        f"{block}.attention.projection": Row(),
        **_feed_forward(config, block),
        f"{root}head": Vocabulary(),
    }
    return ParallelPlan(
        blocks=f"{root}blocks",
        tensor=tensor,
        before=(f"{root}wte", *positions),
        after=(f"{root}norm", f"{root}head"),
        numbers={f"{block}.attention": {"queries_per_kv": PerCopy(heads=config.kv_heads)}},
        selective=(f"{block}.attention.core",),
    )


def _feed_forward(config: GPTConfig, block: str) -> dict[str, Kind]:
    """Return the kinds of the modules of the feed-forward parts.

    Under sequence parallelism a mixture receives the whole sequence: its router computes means over
    it, and tokens are distributed to the experts again.
    """
    mixture = f"{block}.mixture"
    tensor = dict[str, Kind]()
    if config.layers_with_experts < config.num_layers:
        f = config.ffn_size
        up = (
            {f"{block}.mlp.up": Column()}
            if config.mlp == "gelu"
            else {f"{block}.mlp.gate_up": Column(parts=(f, f))}
        )
        tensor |= up | {f"{block}.mlp.down": Row()}
    if config.layers_with_experts:
        tensor |= {
            mixture: Whole(),
            f"{mixture}.experts": Experts(),
        }
    if config.shared_experts:
        f = config.shared_experts * config.expert_size
        tensor |= {
            f"{mixture}.shared.gate_up": Column(parts=(f, f)),
            f"{mixture}.shared.down": Row(),
        }
    return tensor
