"""Correspondence of this package's GPT with Hugging Face's GPT-2, Llama and Mixtral.

``GPTConfig.gpt2`` is ``GPT2LMHeadModel``. ``GPTConfig.llama`` is ``LlamaForCausalLM`` and, for a
model with experts, ``MixtralForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_ptdp.base.checked_json import Check, flag, integer, one_of, optional, record, text
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

_GPT2_ROWS = (
    NameRow("wte", "transformer.wte"),
    NameRow("wpe", "transformer.wpe"),
    NameRow("blocks.*.norm_1", "transformer.h.*.ln_1"),
    NameRow("blocks.*.attention.qkv", "transformer.h.*.attn.c_attn", transposed=True),
    NameRow("blocks.*.attention.projection", "transformer.h.*.attn.c_proj", transposed=True),
    NameRow("blocks.*.norm_2", "transformer.h.*.ln_2"),
    NameRow("blocks.*.mlp.up", "transformer.h.*.mlp.c_fc", transposed=True),
    NameRow("blocks.*.mlp.down", "transformer.h.*.mlp.c_proj", transposed=True),
    NameRow("norm", "transformer.ln_f"),
    NameRow("head", "lm_head"),
)
_GPT2_FIELDS = (
    Field("vocabulary_size", "vocab_size", SIZE),
    Field("sequence_length", "n_positions", SIZE),
    Field("num_layers", "n_layer", SIZE),
    Field("hidden_size", "n_embd", SIZE),
    Field("num_heads", "n_head", SIZE),
    Field("ffn_hidden_size", "n_inner", SIZE, default=None, written="ffn_size"),
    Field("dropout", "resid_pdrop", SHARE, default=0.0),
    Field("init_std", "initializer_range", SHARE, default=0.02),
    Field("norm_eps", "layer_norm_epsilon", NUMBER, default=1e-5),
    Field("tie_embeddings", "tie_word_embeddings", flag, default=True),
)
_END_OF_TEXT = 50256
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def _gpt2_written(config: GPTConfig) -> dict[str, object]:
    if not config.bias or config.kv_heads != config.num_heads:
        raise CheckpointError(
            "Hugging Face's GPT-2 has biases and one key/value head per head, but this model has "
            f"bias={config.bias} and num_kv_heads={config.kv_heads} of num_heads={config.num_heads}"
        )
    return {
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        # Without these keys, transformers uses the end-of-text token of GPT-2's own vocabulary.
        **(
            {}
            if config.vocabulary_size > _END_OF_TEXT
            else {"bos_token_id": None, "eos_token_id": None}
        ),
    }


GPT2 = ModelTable(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    rows=_GPT2_ROWS,
    fields=_GPT2_FIELDS,
    base="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    tied={"head.weight": "wte.weight"},
    hf_tied={"lm_head.weight": "transformer.wte.weight"},
    build=GPT,
    make=GPTConfig.gpt2,
    config_class=GPTConfig,
    choices={"norm": "layer", "position": "learned", "mlp": "gelu"},
    fixed={
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "add_cross_attention": False,
    },
    checks={
        "activation_function": one_of(
            dict.fromkeys(_TANH_GELU, "tanh"), f"GELU in the tanh approximation ({_TANH_GELU})"
        )
    },
    written=_gpt2_written,
)


# ---- Llama and Mixtral ---------------------------------------------------------------------------


def _gate_up(config: GPTConfig) -> tuple[int, int]:
    return config.expert_size, config.expert_size


_ATTENTION = "model.layers.*.self_attn"
_MLP = "model.layers.*.mlp"
_MOE = "model.layers.*.block_sparse_moe"
_COMMON = (
    NameRow("wte", "model.embed_tokens"),
    NameRow("blocks.*.norm_1", "model.layers.*.input_layernorm"),
    NameRow(
        "blocks.*.attention.qkv",
        tuple(f"{_ATTENTION}.{name}_proj" for name in "qkv"),
        sizes=qkv_sizes,
    ),
    NameRow("blocks.*.attention.projection", f"{_ATTENTION}.o_proj"),
    NameRow("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
    NameRow("norm", "model.norm"),
    NameRow("head", "lm_head"),
)
_DENSE = (
    NameRow("blocks.*.mlp.gate_up", (f"{_MLP}.gate_proj", f"{_MLP}.up_proj"), sizes=_gate_up),
    NameRow("blocks.*.mlp.down", f"{_MLP}.down_proj"),
)
_MIXTURE = (
    NameRow("blocks.*.mixture.router.gate", f"{_MOE}.gate"),
    NameRow(
        "blocks.*.mixture.experts.gate_up_proj",
        (f"{_MOE}.experts.*.w1", f"{_MOE}.experts.*.w3"),
        sizes=_gate_up,
        of_experts=True,
    ),
    NameRow("blocks.*.mixture.experts.down_proj", f"{_MOE}.experts.*.w2", of_experts=True),
)
_FIELDS = (
    Field(
        "num_kv_heads",
        "num_key_value_heads",
        SIZE,
        default=None,
        written="kv_heads",
    ),
    Field("tie_embeddings", "tie_word_embeddings", flag, default=False),
    Field("init_std", "initializer_range", SHARE, default=0.02),
    Field("norm_eps", "rms_norm_eps", NUMBER, default=1e-6),
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
    rows=(*_COMMON, *_DENSE),
    fields=(
        *SIZES,
        *_FIELDS,
        Field("bias", "attention_bias", flag, default=False),
    ),
    base="model.",
    ignored=(r"\.rotary_emb\.inv_freq$",),
    tied={"head.weight": "wte.weight"},
    hf_tied={"lm_head.weight": "model.embed_tokens.weight"},
    build=GPT,
    make=GPTConfig.llama,
    config_class=GPTConfig,
    choices={"norm": "rms", "position": "rope", "mlp": "swiglu", "has_experts": False},
    fixed={"hidden_act": "silu"},
    checks={**_CHECKS, "mlp_bias": flag},
    further=_further,
    written=lambda ours: _written(ours) | {"mlp_bias": ours.bias},
)
MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rows=(*_COMMON, *_MIXTURE),
    fields=(
        *(one for one in SIZES if one.ours != "ffn_hidden_size"),
        Field("ffn_hidden_size", "intermediate_size", SIZE, written="expert_size"),
        Field("num_experts", "num_local_experts", SIZE, default=8),
        Field(
            "experts_per_token",
            "num_experts_per_tok",
            integer(2, 1 << 28),
            default=2,
        ),
        *_FIELDS,
    ),
    choices={**LLAMA.choices, "has_experts": True},
    fixed={"hidden_act": "silu", "sliding_window": None},
    checks=_CHECKS,
    written=_written_with_experts,
)
