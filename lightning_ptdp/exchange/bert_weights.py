"""Correspondence of this package's BERT with Hugging Face's two BERT models.

LayerNorm after the residual sums (``norm_order="post"``) is ``BertForPreTraining``; LayerNorm
before them (``"pre"``) is ``MegatronBertForPreTraining``. Both have the heads for masked tokens and
for the order of two sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    NameRow(ours="embeddings.token", theirs="bert.embeddings.word_embeddings"),
    NameRow(ours="embeddings.position", theirs="bert.embeddings.position_embeddings"),
    NameRow(ours="embeddings.segment", theirs="bert.embeddings.token_type_embeddings"),
    NameRow(
        ours="blocks.*.attention.qkv",
        theirs=tuple(f"{_LAYER}.attention.self.{name}" for name in ("query", "key", "value")),
        sizes=qkv_sizes,
    ),
    NameRow(ours="blocks.*.attention.projection", theirs=f"{_LAYER}.attention.output.dense"),
    NameRow(ours="blocks.*.mlp.up", theirs=f"{_LAYER}.intermediate.dense"),
    NameRow(ours="blocks.*.mlp.down", theirs=f"{_LAYER}.output.dense"),
    NameRow(ours="masked_head.dense", theirs="cls.predictions.transform.dense"),
    NameRow(ours="masked_head.norm", theirs="cls.predictions.transform.LayerNorm"),
    # ``theirs`` holds only the bias; the weight is tied to the embedding.
    NameRow(ours="masked_head.decoder", theirs="cls.predictions"),
    NameRow(ours="order_head.pooler", theirs="bert.pooler.dense"),
    NameRow(ours="order_head.classifier", theirs="cls.seq_relationship"),
)
_POST_ROWS = (
    NameRow(ours="embeddings.norm", theirs="bert.embeddings.LayerNorm"),
    NameRow(ours="blocks.*.norm_1", theirs=f"{_LAYER}.attention.output.LayerNorm"),
    NameRow(ours="blocks.*.norm_2", theirs=f"{_LAYER}.output.LayerNorm"),
)
_PRE_ROWS = (
    NameRow(ours="blocks.*.norm_1", theirs=f"{_LAYER}.attention.ln"),
    NameRow(ours="blocks.*.norm_2", theirs=f"{_LAYER}.ln"),
    NameRow(ours="norm", theirs="bert.encoder.ln"),
)
_GELU: Mapping[str, Literal["exact", "tanh"]] = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
_FIELDS = (
    *SIZES,
    Field(theirs="type_vocab_size", ours="num_segments", check=SIZE, default=2),
    Field(
        theirs="hidden_act",
        ours="gelu",
        check=one_of(_GELU, f"one of {sorted(_GELU)}"),
        default="exact",
        written=None,
    ),
    Field(theirs="hidden_dropout_prob", ours="dropout", check=SHARE, default=0.1),
    Field(
        theirs="attention_probs_dropout_prob",
        ours="attention_dropout",
        check=SHARE,
        default=0.1,
        written="attention_dropout_rate",
    ),
    Field(theirs="initializer_range", ours="init_std", check=SHARE, default=0.02),
    Field(theirs="layer_norm_eps", ours="norm_eps", check=NUMBER, default=1e-12),
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


def _family(
    model_type: str,
    architecture: str,
    norm_order: Literal["post", "pre"],
    rows: tuple[NameRow, ...],
) -> ModelTable:
    return ModelTable(
        model_type=model_type,
        architecture=architecture,
        rows=_ROWS + rows,
        fields=_FIELDS,
        base="bert.",
        # Files may repeat tied tensors: the decoder's weight is the embedding's, and its bias is
        # the head's.
        ignored=(r"\.position_ids$", r"^cls\.predictions\.decoder\."),
        tied={"masked_head.decoder.weight": "embeddings.token.weight"},
        older={"gamma": "weight", "beta": "bias"},
        build=Bert,
        make=BertConfig.original if norm_order == "post" else BertConfig.megatron,
        config_class=BertConfig,
        choices={"norm_order": norm_order},
        fixed=_FIXED,
        written=_written,
    )


BERT = _family("bert", "BertForPreTraining", "post", _POST_ROWS)
MEGATRON_BERT = _family("megatron-bert", "MegatronBertForPreTraining", "pre", _PRE_ROWS)
