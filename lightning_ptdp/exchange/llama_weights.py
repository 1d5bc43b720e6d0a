"""Correspondence of ``GPTConfig.llama`` with Hugging Face's Llama and Mixtral.

The classes are ``LlamaForCausalLM`` and, for a model with experts, ``MixtralForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_ptdp.base.checked_json import Check, flag, integer, optional, record, text
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.name_tables import (
    NUMBER,
    SHARE,
    SIZE,
    SIZES,
    Field,
    ModelTable,
    NameRow,
    check_choices,
    qkv_sizes,
)
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import GPTConfig


def _gate_up(config: GPTConfig) -> tuple[int, int]:
    return config.expert_size, config.expert_size


_ATTENTION = "model.layers.*.self_attn"
_MLP = "model.layers.*.mlp"
_MOE = "model.layers.*.block_sparse_moe"
_BESIDE = (
    NameRow(ours="wte", theirs="model.embed_tokens"),
    NameRow(ours="blocks.*.norm_1", theirs="model.layers.*.input_layernorm"),
    NameRow(
        ours="blocks.*.attention.qkv",
        theirs=tuple(f"{_ATTENTION}.{name}_proj" for name in "qkv"),
        sizes=qkv_sizes,
    ),
    NameRow(ours="blocks.*.attention.projection", theirs=f"{_ATTENTION}.o_proj"),
    NameRow(ours="blocks.*.norm_2", theirs="model.layers.*.post_attention_layernorm"),
    NameRow(ours="norm", theirs="model.norm"),
    NameRow(ours="head", theirs="lm_head"),
)
_DENSE = (
    NameRow(
        ours="blocks.*.mlp.gate_up", theirs=(f"{_MLP}.gate_proj", f"{_MLP}.up_proj"), sizes=_gate_up
    ),
    NameRow(ours="blocks.*.mlp.down", theirs=f"{_MLP}.down_proj"),
)
_MIXTURE = (
    NameRow(ours="blocks.*.mixture.router.gate", theirs=f"{_MOE}.gate"),
    NameRow(
        ours="blocks.*.mixture.experts.gate_up_proj",
        theirs=(f"{_MOE}.experts.*.w1", f"{_MOE}.experts.*.w3"),
        sizes=_gate_up,
        of_experts=True,
    ),
    NameRow(
        ours="blocks.*.mixture.experts.down_proj", theirs=f"{_MOE}.experts.*.w2", of_experts=True
    ),
)
_FIELDS = (
    Field(
        theirs="num_key_value_heads",
        ours="num_kv_heads",
        check=SIZE,
        default=None,
        written="kv_heads",
    ),
    Field(theirs="tie_word_embeddings", ours="tie_embeddings", check=flag, default=False),
    Field(theirs="initializer_range", ours="init_std", check=SHARE, default=0.02),
    Field(theirs="rms_norm_eps", ours="norm_eps", check=NUMBER, default=1e-6),
)
_ROPE = record(
    others=True, rope_type=optional(text()), type=optional(text()), rope_theta=optional(NUMBER)
)


_CHECKS: Mapping[str, Check[object]] = {
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "rope_theta": NUMBER,
    "head_dim": SIZE,
}


def _further(hf_config: Mapping[str, Any]) -> dict[str, object]:
    rope = (
        hf_config["rope_parameters"]
        or hf_config["rope_scaling"]
        or dict.fromkeys(("rope_type", "type", "rope_theta"))
    )
    head_dim = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    check_choices(
        GPTConfig,
        {
            "rope_type": (rope["rope_type"] or rope["type"], "default"),
            "head_dim": (hf_config["head_dim"], head_dim),
            "mlp_bias": (bool(hf_config.get("mlp_bias")), bool(hf_config.get("attention_bias"))),
        },
    )
    return {"rope_base": rope["rope_theta"] or hf_config["rope_theta"] or 10_000.0}


def _written(config: GPTConfig) -> dict[str, object]:
    return {
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
    }


def _written_with_experts(config: GPTConfig) -> dict[str, object]:
    """Return Mixtral's further options, after a check for options that Mixtral lacks.

    Mixtral chooses experts by the softmax alone, and normalizes the weights for any number of
    experts.
    """
    unsupported = {
        "shared_experts": config.shared_experts > 0,
        "dense_layers": config.dense_layers > 0,
        "router_score": config.router_score != "softmax",
        "balance": config.balance == "bias",
        "experts_per_token": config.experts_per_token == 1,
    }
    for name in (name for name, is_used in unsupported.items() if is_used):
        raise CheckpointError(
            "Hugging Face's Mixtral has the same experts, but no equivalent of "
            f"{name}={getattr(config, name)!r}"
        )
    return _written(config)


LLAMA = ModelTable(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=(*_BESIDE, *_DENSE),
    fields=(
        *SIZES,
        *_FIELDS,
        Field(theirs="attention_bias", ours="bias", check=flag, default=False),
    ),
    base="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
    tied={"head.weight": "wte.weight"},
    build=GPT,
    make=GPTConfig.llama,
    config_class=GPTConfig,
    choices={"norm": "rms", "position": "rope", "mlp": "swiglu", "has_experts": False},
    fixed={"hidden_act": "silu"},
    checks={**_CHECKS, "mlp_bias": flag},
    further=_further,
    written=lambda ours: _written(ours) | {"mlp_bias": ours.bias},
    is_tied=lambda config: config.tie_embeddings,
)
MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rows=(*_BESIDE, *_MIXTURE),
    fields=(
        *(one for one in SIZES if one.ours != "ffn_hidden_size"),
        Field(
            theirs="intermediate_size", ours="ffn_hidden_size", check=SIZE, written="expert_size"
        ),
        Field(theirs="num_local_experts", ours="num_experts", check=SIZE, default=8),
        Field(
            theirs="num_experts_per_tok",
            ours="experts_per_token",
            check=integer(2, 1 << 28),
            default=2,
        ),
        *_FIELDS,
    ),
    choices={**LLAMA.choices, "has_experts": True},
    fixed={"hidden_act": "silu", "sliding_window": None},
    checks=_CHECKS,
    written=_written_with_experts,
)
