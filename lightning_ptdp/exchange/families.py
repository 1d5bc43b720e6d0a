"""Which models are known, and which of them a configuration is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.gpt2 import GPT2
from lightning_ptdp.exchange.llama import LLAMA
from lightning_ptdp.exchange.tables import Family
from lightning_ptdp.models.gpt_config import GPTConfig

__all__ = ["FAMILIES", "HF_TIED", "family_of_config_json", "family_of_hyper_parameters"]

FAMILIES = (GPT2, LLAMA)

# Names that Hugging Face ties and leaves out of its files: model_type -> alias -> the name that is stored.
HF_TIED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
}


def family_of_config_json(config: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        CheckpointError: None that is known; lists those that are.
    """
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            return family
    known = ", ".join(f"{family.model_type!r}" for family in FAMILIES)
    raise CheckpointError(
        f"config.json has model_type={config.get('model_type')!r}; our own models are read from and written to {known}. A "
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
    try:
        config = GPTConfig(**stored)
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's configuration is not one of our models' ({error})") from error
    choices = (config.norm, config.position, config.mlp)
    if choices == ("layer", "learned", "gelu"):
        return GPT2, config
    if choices == ("rms", "rope", "swiglu"):
        return LLAMA, config
    raise CheckpointError(
        f"a model with norm={config.norm!r}, position={config.position!r} and mlp={config.mlp!r} is neither a GPT-2 "
        "('layer', 'learned', 'gelu') nor a Llama ('rms', 'rope', 'swiglu'); Hugging Face has no model of that kind"
    )
