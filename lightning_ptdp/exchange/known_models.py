"""Model families known to the exchange, and the choice of one by a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.bert_weights import BERT, MEGATRON_BERT
from lightning_ptdp.exchange.gpt_weights import GPT2, LLAMA, MIXTRAL
from lightning_ptdp.exchange.name_tables import Model, ModelTable

FAMILIES = (GPT2, LLAMA, MIXTRAL, BERT, MEGATRON_BERT)


def family_of_config_json(config: Mapping[str, object], file: Path) -> ModelTable:
    """Return the family that the ``config.json`` at ``file`` names.

    Raises:
        CheckpointError: The family is unknown. The message lists the known ones.
    """
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            return family
    names = ", ".join(f"{family.model_type!r}" for family in FAMILIES)
    raise CheckpointError(
        f"{file} has model_type={config.get('model_type')!r}, but models of this package can "
        f"only be converted from and to {names}. Use names='hf' for a LightningModule that "
        "wraps a Hugging Face model, which supports any type"
    )


def model_of_hyper_parameters(hyper_parameters: Mapping[str, object]) -> Model:
    """Return the model of a checkpoint of a native model.

    Raises:
        CheckpointError: The model is not native, or has options that no Hugging Face model has.
    """
    stored = hyper_parameters.get("config")
    if not isinstance(stored, Mapping):
        raise CheckpointError(
            "the checkpoint's hyperparameters have no configuration of a model of this "
            "package. If its module wraps a Hugging Face model, give that model's config.json"
        )
    config = _config(stored)
    for family in FAMILIES:
        if isinstance(config, family.config_class) and _choices(config, family) == family.choices:
            return Model(family, config)
    matches = [family for family in FAMILIES if isinstance(config, family.config_class)]
    options = "; ".join(f"{family.model_type!r} has {_shown(family.choices)}" for family in matches)
    raise CheckpointError(
        f"Hugging Face has no model with {_shown(_choices(config, *matches))}: {options}"
    )


def _choices(config: object, *families: ModelTable) -> dict[str, object]:
    return {name: getattr(config, name) for family in families for name in family.choices}


def _config(stored: Mapping[str, object]) -> object:
    """Return an object of the configuration class that has all the fields."""
    classes = list(dict.fromkeys(family.config_class for family in FAMILIES))
    for config_class in classes:
        if stored.keys() <= {field.name for field in fields(config_class)}:
            try:
                return config_class(**stored)
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"the checkpoint's configuration is not a {config_class.__name__}: {error}"
                ) from error
    names = " or ".join(config_class.__name__ for config_class in classes)
    raise CheckpointError(
        f"the checkpoint's configuration is not one of a model of this package ({names}): its "
        f"fields are {sorted(stored)}"
    )


def _shown(choices: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in choices.items())
