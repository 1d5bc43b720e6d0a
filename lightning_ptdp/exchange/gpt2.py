"""GPT-2: our ``GPTConfig.gpt2`` and Hugging Face's ``GPT2LMHeadModel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.tables import Family, Row, check_choices
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.gpt_config import GPTConfig

__all__ = ["GPT2"]

_ROWS = (
    Row(ours="wte", theirs="transformer.wte"),
    Row(ours="wpe", theirs="transformer.wpe"),
    Row(ours="blocks.*.norm_1", theirs="transformer.h.*.ln_1"),
    Row(ours="blocks.*.attention.qkv", theirs="transformer.h.*.attn.c_attn", transposed=True),
    Row(ours="blocks.*.attention.projection", theirs="transformer.h.*.attn.c_proj", transposed=True),
    Row(ours="blocks.*.norm_2", theirs="transformer.h.*.ln_2"),
    Row(ours="blocks.*.mlp.up", theirs="transformer.h.*.mlp.c_fc", transposed=True),
    Row(ours="blocks.*.mlp.down", theirs="transformer.h.*.mlp.c_proj", transposed=True),
    Row(ours="norm", theirs="transformer.ln_f"),
    Row(ours="head", theirs="lm_head"),
)
_END_OF_TEXT = 50256
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def _config_from(theirs: Mapping[str, Any]) -> GPTConfig:
    activation = theirs.get("activation_function", "gelu_new")
    if activation not in _TANH_GELU:
        raise CheckpointError(
            f"activation_function={activation!r}: our GPT has GELU in the tanh approximation only ({_TANH_GELU})"
        )
    check_choices(
        "GPT",
        {
            "scale_attn_by_inverse_layer_idx": (theirs.get("scale_attn_by_inverse_layer_idx", False), False),
            "scale_attn_weights": (theirs.get("scale_attn_weights", True), True),
            "add_cross_attention": (theirs.get("add_cross_attention", False), False),
        },
    )
    return GPTConfig.gpt2(
        vocabulary_size=theirs["vocab_size"],
        sequence_length=theirs["n_positions"],
        num_layers=theirs["n_layer"],
        hidden_size=theirs["n_embd"],
        num_heads=theirs["n_head"],
        ffn_hidden_size=theirs.get("n_inner"),
        dropout=theirs.get("resid_pdrop", 0.0),
        init_std=theirs.get("initializer_range", 0.02),
        norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=theirs.get("tie_word_embeddings", True),
    )


def _config_to(ours: GPTConfig) -> dict[str, Any]:
    if not ours.bias or ours.kv_heads != ours.num_heads:
        raise CheckpointError(
            f"Hugging Face's GPT-2 has biases and a key/value head for each head; this model has bias={ours.bias} and "
            f"num_kv_heads={ours.kv_heads} of num_heads={ours.num_heads}"
        )
    return {
        "vocab_size": ours.vocabulary_size,
        "n_positions": ours.sequence_length,
        "n_layer": ours.num_layers,
        "n_embd": ours.hidden_size,
        "n_head": ours.num_heads,
        "n_inner": ours.ffn_size,
        "activation_function": "gelu_new",
        "resid_pdrop": ours.dropout,
        "embd_pdrop": ours.dropout,
        "attn_pdrop": ours.dropout,
        "initializer_range": ours.init_std,
        "layer_norm_epsilon": ours.norm_eps,
        "tie_word_embeddings": ours.tie_embeddings,
        # Left out, they would be the end of GPT-2's own vocabulary.
        **({} if ours.vocabulary_size > _END_OF_TEXT else {"bos_token_id": None, "eos_token_id": None}),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    rows=_ROWS,
    base="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    tied={"head.weight": "wte.weight"},
    build=GPT,
    config_class=GPTConfig,
    choices={"norm": "layer", "position": "learned", "mlp": "gelu"},
    config_from=_config_from,
    config_to=_config_to,
    is_tied=lambda config: config.tie_embeddings,
)
