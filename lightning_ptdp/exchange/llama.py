"""Llama: our ``GPTConfig.llama`` and Hugging Face's ``LlamaForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ptdp.exchange.tables import Family, Row, check_choices
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.gpt_config import GPTConfig

__all__ = ["LLAMA"]


def _qkv(config: GPTConfig) -> tuple[int, int, int]:
    kv_width = config.kv_heads * config.head_dim
    return config.hidden_size, kv_width, kv_width


def _gate_up(config: GPTConfig) -> tuple[int, int]:
    return config.ffn_size, config.ffn_size


_ATTENTION, _MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
_ROWS = (
    Row(ours="wte", theirs="model.embed_tokens"),
    Row(ours="blocks.*.norm_1", theirs="model.layers.*.input_layernorm"),
    Row(ours="blocks.*.attention.qkv", theirs=tuple(f"{_ATTENTION}.{name}_proj" for name in "qkv"), sizes=_qkv),
    Row(ours="blocks.*.attention.projection", theirs=f"{_ATTENTION}.o_proj"),
    Row(ours="blocks.*.norm_2", theirs="model.layers.*.post_attention_layernorm"),
    Row(ours="blocks.*.mlp.gate_up", theirs=(f"{_MLP}.gate_proj", f"{_MLP}.up_proj"), sizes=_gate_up),
    Row(ours="blocks.*.mlp.down", theirs=f"{_MLP}.down_proj"),
    Row(ours="norm", theirs="model.norm"),
    Row(ours="head", theirs="lm_head"),
)


def _config_from(theirs: Mapping[str, Any]) -> GPTConfig:
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads, hidden = theirs["num_attention_heads"], theirs["hidden_size"]
    check_choices(
        "GPT",
        {
            "hidden_act": (theirs.get("hidden_act", "silu"), "silu"),
            "rope_type": (kind, "default"),
            "head_dim": (theirs.get("head_dim") or hidden // heads, hidden // heads),
            "mlp_bias": (theirs.get("mlp_bias", False), theirs.get("attention_bias", False)),
        },
    )
    return GPTConfig.llama(
        vocabulary_size=theirs["vocab_size"],
        sequence_length=theirs["max_position_embeddings"],
        num_layers=theirs["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=theirs.get("num_key_value_heads"),
        ffn_hidden_size=theirs["intermediate_size"],
        bias=theirs.get("attention_bias", False),
        tie_embeddings=theirs.get("tie_word_embeddings", False),
        init_std=theirs.get("initializer_range", 0.02),
        norm_eps=theirs.get("rms_norm_eps", 1e-6),
        rope_base=float(rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0),
    )


def _config_to(ours: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": ours.vocabulary_size,
        "max_position_embeddings": ours.sequence_length,
        "num_hidden_layers": ours.num_layers,
        "hidden_size": ours.hidden_size,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.kv_heads,
        "head_dim": ours.head_dim,
        "intermediate_size": ours.ffn_size,
        "hidden_act": "silu",
        "attention_bias": ours.bias,
        "mlp_bias": ours.bias,
        "attention_dropout": ours.dropout,
        "initializer_range": ours.init_std,
        "rms_norm_eps": ours.norm_eps,
        "rope_theta": ours.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_base},
        "tie_word_embeddings": ours.tie_embeddings,
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=_ROWS,
    base="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
    tied={"head.weight": "wte.weight"},
    build=GPT,
    config_class=GPTConfig,
    choices={"norm": "rms", "position": "rope", "mlp": "swiglu"},
    config_from=_config_from,
    config_to=_config_to,
    is_tied=lambda config: config.tie_embeddings,
)
