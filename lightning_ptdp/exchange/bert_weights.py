"""Correspondence of this package's BERT with Hugging Face's two BERT models.

LayerNorm after the residual sums (``norm_order="post"``) is ``BertForPreTraining``; LayerNorm
before them (``"pre"``) is ``MegatronBertForPreTraining``. Both have the heads for masked tokens and
for the order of two sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from lightning_ptdp.base.checked_json import one_of
from lightning_ptdp.exchange.name_tables import (
    NUMBER,
    SHARE,
    SIZE,
    SIZES,
    Field,
    ModelTable,
    NameRow,
    qkv_sizes,
)
from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.model_config import BertConfig

_LAYER = "bert.encoder.layer.*"
_ROWS = (
    NameRow("embeddings.token", "bert.embeddings.word_embeddings"),
    NameRow("embeddings.position", "bert.embeddings.position_embeddings"),
    NameRow("embeddings.segment", "bert.embeddings.token_type_embeddings"),
    NameRow(
        "blocks.*.attention.qkv",
        tuple(f"{_LAYER}.attention.self.{name}" for name in ("query", "key", "value")),
        sizes=qkv_sizes,
    ),
    NameRow("blocks.*.attention.projection", f"{_LAYER}.attention.output.dense"),
    NameRow("blocks.*.mlp.up", f"{_LAYER}.intermediate.dense"),
    NameRow("blocks.*.mlp.down", f"{_LAYER}.output.dense"),
    NameRow("masked_head.dense", "cls.predictions.transform.dense"),
    NameRow("masked_head.norm", "cls.predictions.transform.LayerNorm"),
    # ``theirs`` holds only the bias; the weight is tied to the embedding.
    NameRow("masked_head.decoder", "cls.predictions"),
    NameRow("order_head.pooler", "bert.pooler.dense"),
    NameRow("order_head.classifier", "cls.seq_relationship"),
)
_POST_ROWS = (
    NameRow("embeddings.norm", "bert.embeddings.LayerNorm"),
    NameRow("blocks.*.norm_1", f"{_LAYER}.attention.output.LayerNorm"),
    NameRow("blocks.*.norm_2", f"{_LAYER}.output.LayerNorm"),
)
_PRE_ROWS = (
    NameRow("blocks.*.norm_1", f"{_LAYER}.attention.ln"),
    NameRow("blocks.*.norm_2", f"{_LAYER}.ln"),
    NameRow("norm", "bert.encoder.ln"),
)
_GELU: Mapping[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
_FIELDS = (
    *SIZES,
    Field("num_segments", "type_vocab_size", SIZE, default=2),
    Field(
        "gelu",
        "hidden_act",
        one_of(_GELU, f"one of {sorted(_GELU)}"),
        default="exact",
        written=None,
    ),
    Field("dropout", "hidden_dropout_prob", SHARE, default=0.1),
    Field(
        "attention_dropout",
        "attention_probs_dropout_prob",
        SHARE,
        default=0.1,
        written="attention_dropout_rate",
    ),
    Field("init_std", "initializer_range", SHARE, default=0.02),
    Field("norm_eps", "layer_norm_eps", NUMBER, default=1e-12),
)
_FIXED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def _written(config: BertConfig) -> dict[str, object]:
    return {
        "hidden_act": "gelu" if config.gelu == "exact" else "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }


BERT = ModelTable(
    model_type="bert",
    architecture="BertForPreTraining",
    rows=_ROWS + _POST_ROWS,
    fields=_FIELDS,
    base="bert.",
    # Files may repeat tied tensors: the decoder's weight is the embedding's, and its bias is the
    # head's.
    ignored=(r"\.position_ids$", r"^cls\.predictions\.decoder\."),
    tied={"masked_head.decoder.weight": "embeddings.token.weight"},
    hf_tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    older={"gamma": "weight", "beta": "bias"},
    build=Bert,
    make=BertConfig.original,
    config_class=BertConfig,
    choices={"norm_order": "post"},
    fixed=_FIXED,
    written=_written,
)
MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    rows=_ROWS + _PRE_ROWS,
    make=BertConfig.megatron,
    choices={"norm_order": "pre"},
)
