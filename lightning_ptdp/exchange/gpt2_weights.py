"""Correspondence of ``GPTConfig.gpt2`` with Hugging Face's ``GPT2LMHeadModel``."""

from __future__ import annotations

from lightning_ptdp.base.checked_json import flag, one_of
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.name_tables import NUMBER, SHARE, SIZE, Field, ModelTable, NameRow
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import GPTConfig

_ROWS = (
    NameRow(ours="wte", theirs="transformer.wte"),
    NameRow(ours="wpe", theirs="transformer.wpe"),
    NameRow(ours="blocks.*.norm_1", theirs="transformer.h.*.ln_1"),
    NameRow(ours="blocks.*.attention.qkv", theirs="transformer.h.*.attn.c_attn", transposed=True),
    NameRow(
        ours="blocks.*.attention.projection", theirs="transformer.h.*.attn.c_proj", transposed=True
    ),
    NameRow(ours="blocks.*.norm_2", theirs="transformer.h.*.ln_2"),
    NameRow(ours="blocks.*.mlp.up", theirs="transformer.h.*.mlp.c_fc", transposed=True),
    NameRow(ours="blocks.*.mlp.down", theirs="transformer.h.*.mlp.c_proj", transposed=True),
    NameRow(ours="norm", theirs="transformer.ln_f"),
    NameRow(ours="head", theirs="lm_head"),
)
_FIELDS = (
    Field(theirs="vocab_size", ours="vocabulary_size", check=SIZE),
    Field(theirs="n_positions", ours="sequence_length", check=SIZE),
    Field(theirs="n_layer", ours="num_layers", check=SIZE),
    Field(theirs="n_embd", ours="hidden_size", check=SIZE),
    Field(theirs="n_head", ours="num_heads", check=SIZE),
    Field(theirs="n_inner", ours="ffn_hidden_size", check=SIZE, default=None, written="ffn_size"),
    Field(theirs="resid_pdrop", ours="dropout", check=SHARE, default=0.0),
    Field(theirs="initializer_range", ours="init_std", check=SHARE, default=0.02),
    Field(theirs="layer_norm_epsilon", ours="norm_eps", check=NUMBER, default=1e-5),
    Field(theirs="tie_word_embeddings", ours="tie_embeddings", check=flag, default=True),
)
_END_OF_TEXT = 50256
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def _written(config: GPTConfig) -> dict[str, object]:
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
    rows=_ROWS,
    fields=_FIELDS,
    base="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    tied={"head.weight": "wte.weight"},
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
    written=_written,
    is_tied=lambda config: config.tie_embeddings,
)
