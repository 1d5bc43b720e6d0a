"""Construction of transformers' models from a configuration and, optionally, weights."""

from __future__ import annotations

from typing import Any

import torch

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.models.pretrained_folder import local_folder


def check_causal(config: Any, *, said: str) -> None:
    """Refuse an encoder such as BERT as a causal language model.

    transformers builds such a model without an error, but its tokens see later tokens.

    Args:
        config: Configuration of transformers.
        said: Option of the user, for messages.

    Raises:
        ValueError: The model's attention is not causal.
    """
    transformers = import_optional("transformers")
    is_encoder = (
        type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    )
    if is_encoder and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"{said} is a {config.model_type} model with is_decoder=False, so its tokens "
            "attend to later ones, which a causal language model has to predict. Use "
            'LitMaskedLM, or set "is_decoder": true in config.json'
        )


def without_values(kind: Any, config: Any, *, said: str, **options: Any) -> Any:
    """Build a model on the meta device.

    This takes no memory, and detects models that cannot be built.

    Args:
        kind: The Auto class.
        config: Configuration of transformers.
        said: Option of the user, for messages.
        options: Arguments of ``from_config``.

    Raises:
        ValueError: The configuration belongs to another kind of model, or the model cannot be
            built.
    """
    try:
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # a model's own code can raise any type
        if "Unrecognized configuration class" in str(error):
            raise ValueError(
                f"{said} has a model of type {config.model_type!r}, which {kind.__name__} does "
                "not support. Use LitCausalLM for a causal language model, LitMaskedLM for an "
                "encoder, and your own LightningModule for other models"
            ) from None
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{said}: the model of its configuration cannot be built ({why})"
        ) from error


def with_values(kind: Any, config: Any, weights: str | None, *, said: str, **options: Any) -> Any:
    """Build a model with the weights of a folder or of the hub.

    Without ``weights``, the model has initial values.

    Raises:
        ValueError: The weights are missing, or have other shapes than the configuration describes.
    """
    if weights is None:
        return kind.from_config(config, trust_remote_code=False, **options)
    options |= {"config": config, "use_safetensors": True, "trust_remote_code": False}
    try:
        return kind.from_pretrained(local_folder(weights), **options).train()
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"{said}: the shapes of the weights differ from config.json") from error
    except OSError as error:
        raise ValueError(f"{said}: the weights cannot be read ({one_line(error)})") from error
