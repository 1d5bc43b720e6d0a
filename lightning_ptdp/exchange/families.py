"""Which models are known, and which of them a configuration is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_ptdp.checked_json import Check, Misfit, flag, integer, map_of, number, optional, record, text
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.bert import BERT, MEGATRON_BERT
from lightning_ptdp.exchange.gpt2 import GPT2
from lightning_ptdp.exchange.llama import LLAMA
from lightning_ptdp.exchange.tables import MOST_EXTENT, Family

__all__ = ["FAMILIES", "HF_TIED", "config_of_json", "family_of_config_json", "family_of_hyper_parameters"]

FAMILIES = (GPT2, LLAMA, BERT, MEGATRON_BERT)

_BERT_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

# Names that Hugging Face ties and leaves out of its files: model_type -> alias -> the name that is stored.
HF_TIED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
    "bert": _BERT_TIED,
    "megatron-bert": _BERT_TIED,
}


_TEXTS = ("activation_function", "hidden_act", "position_embedding_type")
_FLAGS = (
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "add_cross_attention",
    "attention_bias",
    "mlp_bias",
    "is_decoder",
)
_SHARES = ("resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
_NUMBERS = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "rope_theta")
_SIZES = (
    *("vocab_size", "n_positions", "n_layer", "n_embd", "n_head", "n_inner", "max_position_embeddings", "num_hidden_layers"),
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim", "type_vocab_size"),
)
_ROPE = record(others=True, rope_type=optional(text()), type=optional(text()), rope_theta=optional(number(0, 1e18)))
_FIELDS: dict[str, Check[Any]] = {
    **dict.fromkeys(_SIZES, integer(1, MOST_EXTENT)),
    **dict.fromkeys(_TEXTS, text()),
    **dict.fromkeys(_FLAGS, flag),
    **dict.fromkeys(_SHARES, number(0, 1)),
    **dict.fromkeys(_NUMBERS, number(0, 1e18)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE),
}


def config_of_json(file: Path, content: Any, *, ours: bool) -> dict[str, Any]:
    """What a ``config.json`` holds, of which those fields that we read are what they should be.

    Args:
        file: For messages.
        content: The parsed file.
        ours: Whether it shall be the configuration of one of our models: null is as good as missing there. Else only those fields are
            looked at that any model has.

    Raises:
        CheckpointError: They are not.
    """
    fields: dict[str, Check[Any]] = {"model_type": text(), "tie_word_embeddings": flag, **(_FIELDS if ours else {})}
    try:
        given = map_of(lambda value: value)(content)
        record(others=True, **{name: optional(field) for name, field in fields.items()})(given)
    except Misfit as error:
        raise CheckpointError(f"{file}: {error}") from error
    return {name: value for name, value in given.items() if value is not None} if ours else given


def family_of_config_json(config: Mapping[str, Any], file: Path) -> Family:
    """The family that the ``config.json`` at ``file`` names.

    Raises:
        CheckpointError: None that is known; lists those that are.
    """
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            return family
    known = ", ".join(f"{family.model_type!r}" for family in FAMILIES)
    raise CheckpointError(
        f"{file} has model_type={config.get('model_type')!r}; our own models are read from and written to {known}. A "
        "LightningModule that wraps a Hugging Face model takes any: convert with their names (names='hf')"
    )


def family_of_hyper_parameters(hyper_parameters: Mapping[str, Any]) -> tuple[Family, Any]:
    """The family of a checkpoint of one of our models, and its configuration.

    Raises:
        CheckpointError: It is none of ours, or has choices that no model of Hugging Face's has.
    """
    stored = hyper_parameters.get("config")
    if not isinstance(stored, Mapping):
        raise CheckpointError(
            "the checkpoint's hyperparameters name no configuration of one of our models. If its module wraps a Hugging Face model, "
            "name that model's config.json"
        )
    config = _config(stored)
    for family in FAMILIES:
        if family.describes(config):
            return family, config
    alike = [family for family in FAMILIES if isinstance(config, family.config_class)]
    known = "; ".join(f"{family.model_type!r} has {_shown(family.choices)}" for family in alike)
    found = {name: getattr(config, name) for family in alike for name in family.choices}
    raise CheckpointError(f"Hugging Face has no model with {_shown(found)}: {known}")


def _config(stored: Mapping[str, Any]) -> Any:
    """Of the class that has all the fields."""
    classes = list(dict.fromkeys(family.config_class for family in FAMILIES))
    for config_class in classes:
        if stored.keys() <= {field.name for field in fields(config_class)}:
            try:
                return config_class(**stored)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"the checkpoint's configuration is not a {config_class.__name__}: {error}") from error
    names = " or ".join(config_class.__name__ for config_class in classes)
    raise CheckpointError(f"the checkpoint's configuration is not one of our models' ({names}): its fields are {sorted(stored)}")


def _shown(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in choices.items())
