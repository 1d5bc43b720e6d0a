"""Llama: our ``GPTConfig.llama`` and Hugging Face's ``LlamaForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ptdp.checked_json import flag, optional, record, text
from lightning_ptdp.exchange.tables import NUMBER, SHARE, SIZE, SIZES, Family, Field, Row, check_choices
from lightning_ptdp.models.config import GPTConfig
from lightning_ptdp.models.gpt import GPT

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
_FIELDS = (
    *SIZES,
    Field(theirs="num_key_value_heads", ours="num_kv_heads", check=SIZE, default=None, written="kv_heads"),
    Field(theirs="attention_bias", ours="bias", check=flag, default=False),
    Field(theirs="tie_word_embeddings", ours="tie_embeddings", check=flag, default=False),
    Field(theirs="initializer_range", ours="init_std", check=SHARE, default=0.02),
    Field(theirs="rms_norm_eps", ours="norm_eps", check=NUMBER, default=1e-6),
)
_ROPE = record(others=True, rope_type=optional(text()), type=optional(text()), rope_theta=optional(NUMBER))


def _further(theirs: Mapping[str, Any]) -> dict[str, object]:
    rope = theirs["rope_parameters"] or theirs["rope_scaling"] or dict.fromkeys(("rope_type", "type", "rope_theta"))
    head_dim = theirs["hidden_size"] // theirs["num_attention_heads"]
    check_choices(
        GPTConfig,
        {
            "rope_type": (rope["rope_type"] or rope["type"], "default"),
            "head_dim": (theirs["head_dim"], head_dim),
            "mlp_bias": (bool(theirs["mlp_bias"]), bool(theirs["attention_bias"])),
        },
    )
    return {"rope_base": rope["rope_theta"] or theirs["rope_theta"] or 10_000.0}


def _written(ours: GPTConfig) -> dict[str, object]:
    return {
        "head_dim": ours.head_dim,
        "hidden_act": "silu",
        "mlp_bias": ours.bias,
        "attention_dropout": ours.dropout,
        "rope_theta": ours.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rope_base},
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=_ROWS,
    fields=_FIELDS,
    base="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
    tied={"head.weight": "wte.weight"},
    build=GPT,
    make=GPTConfig.llama,
    config_class=GPTConfig,
    choices={"norm": "rms", "position": "rope", "mlp": "swiglu"},
    fixed={"hidden_act": "silu"},
    checks={"rope_parameters": _ROPE, "rope_scaling": _ROPE, "rope_theta": NUMBER, "head_dim": SIZE, "mlp_bias": flag},
    further=_further,
    written=_written,
    is_tied=lambda config: config.tie_embeddings,
)
