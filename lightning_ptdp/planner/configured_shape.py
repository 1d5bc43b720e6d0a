"""The shape of a model that is given by its configuration alone.

The model is built on the meta device and traced like any other (``model_trace.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.models.bert import Bert, bert_plan
from lightning_ptdp.models.gpt import GPT, gpt_plan
from lightning_ptdp.models.layers import AttentionCore, make_linear
from lightning_ptdp.models.memory_saving import RMSNorm, Rotary
from lightning_ptdp.models.model_config import BertConfig, GPTConfig, split_widths
from lightning_ptdp.planner.model_trace import call_with, trace_shape
from lightning_ptdp.planner.shapes import Divided, ModelShape
from lightning_ptdp.planner.software import Precision, Software
from lightning_ptdp.tensor_parallel import Column, ParallelPlan


@functools.lru_cache(maxsize=64)
def configured_shape(
    config: GPTConfig | BertConfig,
    *,
    sequence_length: int,
    precision: Precision,
    software: Software,
    on_cpu: bool,
) -> ModelShape:
    """Return the shape of the model that ``config`` describes.

    Args:
        config: The model.
        sequence_length: s in tokens.
        precision: Precision of the counted bytes.
        software: Software whose reads and writes are counted.
        on_cpu: Whether the model runs on CPUs.
    """
    mixtures = config.layers_with_experts if isinstance(config, GPTConfig) else 0
    counts = [count for count in (config.num_layers - mixtures, mixtures) if count]
    # One layer of each kind. What exceeds a capacity depends on values.
    changes: Any = {"dense_layers": len(counts) - 1, "capacity_factor": None} if mixtures else {}
    reduced = replace(config, num_layers=len(counts), **changes)
    with torch.device("meta"):
        model, plan = _built(reduced)
    shape = trace_shape(
        model,
        plan,
        call_with(model, None, sequence_length=sequence_length),
        precision=precision,
        software=software,
        on_cpu=on_cpu,
        sequence_length=sequence_length,
    )
    # by the names of the configuration, which the user knows
    divided = (
        Divided(name="num_heads", size=config.num_heads),
        Divided(name="num_kv_heads", size=config.kv_heads, copied=True),
        *(Divided(name=name, size=size) for name, size in split_widths(config).items()),
    )
    return replace(shape, divided=divided, runs=tuple(zip(counts, shape.layers, strict=True)))


def _built(config: GPTConfig | BertConfig) -> tuple[nn.Module, ParallelPlan]:
    if isinstance(config, BertConfig):
        return Bert(config), bert_plan(config, prefix="")
    model = GPT(config)
    plan = gpt_plan(config, prefix="")
    if isinstance(config, PlannedGPT) and config.latent is not None:
        for block in model.blocks:
            block.attention = _LatentAttention(config, config.latent)
        tensor = {name: kind for name, kind in plan.tensor.items() if "qkv" not in name}
        columns = {f"blocks.*.attention.{name}": Column() for name in ("queries", "key_values")}
        plan = replace(plan, tensor=tensor | columns, numbers={})
    return model, plan


class _LatentAttention(nn.Module):
    """Latent attention; (b, s, h) -> (b, s, h). It is traced and never trained."""

    def __init__(self, config: GPTConfig, latent: Latent) -> None:
        super().__init__()
        self.latent = latent
        self.heads = config.num_heads
        h = config.hidden_size
        n = config.num_heads
        self.query_down: nn.Module = nn.Identity()
        if latent.queries:
            self.query_down = nn.Sequential(
                make_linear(config, latent.queries), RMSNorm(latent.queries)
            )
        width = latent.plain + latent.turned
        self.queries = nn.Linear(latent.queries or h, n * width, bias=False)
        self.down = make_linear(config, latent.keys + latent.turned)
        self.norm = RMSNorm(latent.keys)
        self.key_values = nn.Linear(latent.keys, n * (latent.plain + latent.values), bias=False)
        self.rotary = Rotary(latent.turned, config.rope_base)
        self.core = AttentionCore(config.dropout, is_causal=True)
        self.projection = nn.Linear(n * latent.values, h, bias=False)

    def forward(self, x_bsh: Tensor, *_: object) -> Tensor:
        latent = self.latent
        q_bsnd = torch.unflatten(self.queries(self.query_down(x_bsh)), -1, (self.heads, -1))
        narrow, shared = self.down(x_bsh).split((latent.keys, latent.turned), -1)
        k_v = torch.unflatten(self.key_values(self.norm(narrow)), -1, (self.heads, -1))
        k_bsnd, v_bsnd = k_v.split((latent.plain, latent.values), -1)
        q_bsnd, to_turn = q_bsnd.split((latent.plain, latent.turned), -1)
        to_turn = torch.cat((to_turn, shared.unsqueeze(2)), 2)
        turned = self.rotary(to_turn, turned=self.heads + 1)
        queries, key = turned.split((self.heads, 1), 2)
        q_bsnd = torch.cat((q_bsnd, queries), -1)
        k_bsnd = torch.cat((k_bsnd, key.expand(-1, -1, self.heads, -1)), -1)
        return self.projection(self.core(q_bsnd, k_bsnd, v_bsnd).flatten(2))


# ---- The sizes of a Hugging Face configuration as those of an equivalent GPT of ours -------------
#
# An equivalent GPT keeps and computes the same amount.


_NAMES = {
    "vocabulary_size": ("vocab_size",),
    "sequence_length": ("max_position_embeddings", "n_positions"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
}
_NEEDED = ("vocabulary_size", "sequence_length", "num_layers", "hidden_size", "num_heads")
_MIXTURE = {
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k"),
    "expert_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
}
_LATENT = {
    "keys": ("kv_lora_rank",),
    "plain": ("qk_nope_head_dim",),
    "turned": ("qk_rope_head_dim",),
    "values": ("v_head_dim",),
}
_GATED = ("silu", "swish")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (arXiv 2405.04434, section 2.1).

    Queries, keys and values are computed from a narrower representation.

    Attributes:
        queries: Channels from which queries are computed; None means the residual stream.
        keys: Channels from which keys and values are computed.
        plain: Channels of a head's query and key without rotary position.
        turned: Channels with rotary position; those of the key are shared by all heads.
        values: Channels of a head's values.
    """

    queries: Size | None
    keys: Size
    plain: Size
    turned: Size
    values: Size


@dataclass(frozen=True, kw_only=True)
class PlannedGPT(GPTConfig):
    """A GPT that is planned, not built.

    Attributes:
        head_size: Channels of a head; None means ``hidden_size / num_heads``.
        latent: Latent attention; None means the attention of a GPT.
    """

    head_size: Size | None = None
    latent: Latent | None = None

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return super().head_dim if self.head_size is None else self.head_size

    def _check_heads(self) -> None:
        if self.head_size is None:
            super()._check_heads()


_PERIODS = (
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "expert_layer_period",
    "moe_layer_freq",
)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def gpt_sizes(config: object) -> GPTConfig | BertConfig:
    """Return a GPT with the sizes of ``config``; a configuration of ours stays as it is.

    Gated feed-forward parts and RMSNorm are assumed if the configuration has key/value heads, as
    models similar to Llama do.

    Args:
        config: A configuration of ours, a Hugging Face configuration object, or the values of its
            ``config.json``.

    Raises:
        ValueError: A size is missing, or the model has a part that our GPT lacks. The message names
            it.
    """
    if isinstance(config, GPTConfig | BertConfig):
        return config
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    sizes = _found(values, _NAMES)
    if missing := [_NAMES[field][0] for field in _NEEDED if field not in sizes]:
        raise ValueError(
            f"its configuration has no {', '.join(missing)}. Give the sizes as options, such "
            "as --layers 24"
        )
    kinds = sorted({str(kind) for kind in values.get("layer_types") or ()} - _ATTENTION)
    if kinds := kinds or sorted(name for name in values if name.startswith("mamba_"))[:1]:
        raise ValueError(
            f"its layers are not all attention ({', '.join(kinds)}). Give the sizes of a model "
            "that needs about the same time"
        )
    sizes |= _mixture(values)
    tied = bool(values.get("tie_word_embeddings", True))
    if "num_kv_heads" in sizes or "num_experts" in sizes:
        head = values.get("head_dim")
        return PlannedGPT.llama(
            **sizes, tie_embeddings=tied, head_size=head, latent=_latent(values)
        )
    return GPTConfig.gpt2(
        **sizes, tie_embeddings=tied, mlp="swiglu" if values.get("hidden_act") in _GATED else "gelu"
    )


def _found(values: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the fields of which the values have one of their names."""
    found = dict[str, Any]()
    for field, aliases in names.items():
        given = [values[name] for name in aliases if values.get(name)]
        if given:
            found[field] = given[0]
    return found


def _latent(values: Mapping[str, Any]) -> Latent | None:
    sizes = _found(values, _LATENT)
    if "keys" not in sizes:
        return None
    if missing := [names[0] for field, names in _LATENT.items() if field not in sizes]:
        raise ValueError(
            f"its configuration has kv_lora_rank={sizes['keys']!r}, but no {', '.join(missing)}"
        )
    return Latent(queries=values.get("q_lora_rank"), **sizes)


def _mixture(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a GPT with experts; none if it has at most one expert."""
    sizes = _found(values, _MIXTURE)
    if sizes.get("num_experts", 1) == 1:
        return {}
    if "experts_per_token" not in sizes:
        raise ValueError(
            f"num_experts={sizes['num_experts']!r}, but the number of active experts per token "
            "is unknown (num_experts_per_tok)"
        )
    for name in _PERIODS:
        if (period := values.get(name) or 1) != 1:
            raise ValueError(
                f"{name}={period!r} is not supported: layers without experts must come first"
            )
    if shared := values.get("shared_expert_intermediate_size"):
        sizes["shared_experts"] = max(1, round(shared / sizes["expert_hidden_size"]))
    if dense := values.get("mlp_only_layers"):
        if sorted(dense) != list(range(len(dense))):
            raise ValueError(
                f"mlp_only_layers={dense!r} is not supported: layers without experts must come "
                "first"
            )
        sizes["dense_layers"] = len(dense)
    return sizes
