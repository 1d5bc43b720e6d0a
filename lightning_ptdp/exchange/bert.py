"""BERT: our two orders of LayerNorm and the two models that Hugging Face has for them.

LayerNorm behind the sums (``norm_order="post"``) is ``BertForPreTraining``, in front (``"pre"``) ``MegatronBertForPreTraining``. Both have
the heads for masked tokens and for the order of two sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.tables import Family, Row, check_choices
from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.bert_config import BertConfig

__all__ = ["BERT", "MEGATRON_BERT"]


def _qkv(config: BertConfig) -> tuple[int, int, int]:
    return config.hidden_size, config.hidden_size, config.hidden_size


_LAYER = "bert.encoder.layer.*"
_ROWS = (
    Row(ours="embeddings.token", theirs="bert.embeddings.word_embeddings"),
    Row(ours="embeddings.position", theirs="bert.embeddings.position_embeddings"),
    Row(ours="embeddings.segment", theirs="bert.embeddings.token_type_embeddings"),
    Row(
        ours="blocks.*.attention.qkv",
        theirs=tuple(f"{_LAYER}.attention.self.{name}" for name in ("query", "key", "value")),
        sizes=_qkv,
    ),
    Row(ours="blocks.*.attention.projection", theirs=f"{_LAYER}.attention.output.dense"),
    Row(ours="blocks.*.mlp.up", theirs=f"{_LAYER}.intermediate.dense"),
    Row(ours="blocks.*.mlp.down", theirs=f"{_LAYER}.output.dense"),
    Row(ours="masked_head.dense", theirs="cls.predictions.transform.dense"),
    Row(ours="masked_head.norm", theirs="cls.predictions.transform.LayerNorm"),
    Row(ours="masked_head.decoder", theirs="cls.predictions"),  # its bias; the weight is the embedding's
    Row(ours="order_head.pooler", theirs="bert.pooler.dense"),
    Row(ours="order_head.classifier", theirs="cls.seq_relationship"),
)
_POST_ROWS = (
    Row(ours="embeddings.norm", theirs="bert.embeddings.LayerNorm"),
    Row(ours="blocks.*.norm_1", theirs=f"{_LAYER}.attention.output.LayerNorm"),
    Row(ours="blocks.*.norm_2", theirs=f"{_LAYER}.output.LayerNorm"),
)
_PRE_ROWS = (
    Row(ours="blocks.*.norm_1", theirs=f"{_LAYER}.attention.ln"),
    Row(ours="blocks.*.norm_2", theirs=f"{_LAYER}.ln"),
    Row(ours="norm", theirs="bert.encoder.ln"),
)
_GELU: Mapping[str, Literal["exact", "tanh"]] = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def _config_from(theirs: Mapping[str, Any], *, norm_order: Literal["post", "pre"]) -> BertConfig:
    activation = theirs.get("hidden_act", "gelu")
    if activation not in _GELU:
        raise CheckpointError(f"hidden_act={activation!r}: our BERT has {sorted(_GELU)} only")
    check_choices(
        "BERT",
        {
            "position_embedding_type": (theirs.get("position_embedding_type", "absolute"), "absolute"),
            "is_decoder": (theirs.get("is_decoder", False), False),
            "add_cross_attention": (theirs.get("add_cross_attention", False), False),
            "tie_word_embeddings": (theirs.get("tie_word_embeddings", True), True),
        },
    )
    make = BertConfig.original if norm_order == "post" else BertConfig.megatron
    return make(
        vocabulary_size=theirs["vocab_size"],
        sequence_length=theirs["max_position_embeddings"],
        num_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        num_heads=theirs["num_attention_heads"],
        ffn_hidden_size=theirs["intermediate_size"],
        num_segments=theirs.get("type_vocab_size", 2),
        gelu=_GELU[activation],
        dropout=theirs.get("hidden_dropout_prob", 0.1),
        attention_dropout=theirs.get("attention_probs_dropout_prob", 0.1),
        init_std=theirs.get("initializer_range", 0.02),
        norm_eps=theirs.get("layer_norm_eps", 1e-12),
    )


def _config_to(ours: BertConfig) -> dict[str, Any]:
    return {
        "vocab_size": ours.vocabulary_size,
        "max_position_embeddings": ours.sequence_length,
        "num_hidden_layers": ours.num_layers,
        "hidden_size": ours.hidden_size,
        "num_attention_heads": ours.num_heads,
        "intermediate_size": ours.ffn_size,
        "type_vocab_size": ours.num_segments,
        "hidden_act": "gelu" if ours.gelu == "exact" else "gelu_pytorch_tanh",
        "hidden_dropout_prob": ours.dropout,
        "attention_probs_dropout_prob": ours.attention_dropout_rate,
        "initializer_range": ours.init_std,
        "layer_norm_eps": ours.norm_eps,
        "tie_word_embeddings": True,
    }


def _family(model_type: str, architecture: str, norm_order: Literal["post", "pre"], rows: tuple[Row, ...]) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        rows=_ROWS + rows,
        base="bert.",
        # Files may repeat what is tied: the decoder's weight is the embedding's, its bias the head's.
        ignored=(r"\.position_ids$", r"^cls\.predictions\.decoder\."),
        tied={"masked_head.decoder.weight": "embeddings.token.weight"},
        older={"gamma": "weight", "beta": "bias"},
        build=Bert,
        config_class=BertConfig,
        choices={"norm_order": norm_order},
        config_from=partial(_config_from, norm_order=norm_order),
        config_to=_config_to,
    )


BERT = _family("bert", "BertForPreTraining", "post", _POST_ROWS)
MEGATRON_BERT = _family("megatron-bert", "MegatronBertForPreTraining", "pre", _PRE_ROWS)
