"""Configuration of a Hugging Face model, checked, and the model that is built from it."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.base.untrusted import MOST_SETTINGS, parse_json, small_files
from lightning_ptdp.models.pretrained_folder import (
    CONFIG_FILE,
    config_folder,
    local_folder,
    stored_tensors,
    without_prefix,
)
from lightning_ptdp.models.tiny import TINY_SIZES

_READ = ("*.json", "*.txt", "*.model", "*.jinja")
_WORD = re.compile(r"\w+")
_SIZE = re.compile(
    r"((hidden|intermediate|vocab|embedding)_size|_(heads|experts|embd|inner)|head_dim|d_model|d_ff"
    r"|ffn_dim|n_head)$"
)
_BLOCKS = re.compile(r"(?<!feature)_(layers?|experts)$")
_EPSILON = re.compile(r"(^|_)eps(ilon)?$")
_MOST_SIZE = 2**31 - 1
_MOST_BLOCKS = 4096
_FEW_BLOCKS = 256
"""Layers that are built in a second.

Models whose layers share one layer's tensors may have this many without more tensors.
"""
_FLOATING = ("float16", "bfloat16", "float32", "float64")


def config_values(path: str) -> Mapping[str, Any]:
    """Return the content of the ``config.json`` of ``path``.

    Nothing else is downloaded or created. For ``tiny:FOLDER`` without the folder, these are the
    sizes of the model that would be created there.

    Raises:
        ValueError: It is missing, damaged, or cannot be downloaded within a few seconds.
    """
    name = without_prefix(path)
    if name != path and not os.path.isdir(name):
        return TINY_SIZES
    return _read_config(config_folder(name), path)


def read_model_config(path: str) -> Any:
    """Return the configuration that transformers reads from the folder of ``path``.

    Its numbers are compared with the weights in the folder. No code in the folder is run.

    Raises:
        ValueError: It is missing or damaged, belongs to no known model, or does not fit the
            weights.
    """
    transformers = import_optional("transformers")

    folder = local_folder(path)
    values = _read_config(folder, path)
    kind = values.get("model_type")
    if values.get("auto_map") and (
        not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING
    ):
        raise ValueError(
            f"path={path!r}: transformers {transformers.__version__} has no "
            f"model_type={kind!r}, and {CONFIG_FILE} refers to code in the model's folder "
            "(auto_map), which is not run. Use the model in your own LightningModule"
        )
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the checks of transformers raise many types
        reason = str(error).strip().partition("\n")[0][:300]
        raise ValueError(
            f"path={path!r}: transformers {transformers.__version__} finds no model "
            f"configuration in {CONFIG_FILE} ({reason})"
        ) from error


def _read_config(folder: Path, path: str) -> dict[str, Any]:
    label = f"path={path!r}"
    if not os.path.lexists(folder / CONFIG_FILE):
        raise ValueError(
            f"{label}: {folder} has no {CONFIG_FILE}. Give the folder that save_pretrained wrote"
        )
    try:
        small_files(folder, _READ)
        values: dict[str, Any] = parse_json(
            (folder / CONFIG_FILE).read_bytes(), most_values=MOST_SETTINGS
        )
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_FILE} must be a JSON object")
        stored = stored_tensors(folder)
    except OSError as error:
        raise ValueError(
            f"{label}: {error.filename or folder} cannot be read: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{label}: a file of {folder} is damaged: {error}") from error
    check_sizes(values, f"{label}: {CONFIG_FILE}: ", stored=stored)
    return values


def config_of_sizes(sizes: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers for the content of a ``config.json``.

    Missing fields have the model's default.

    Raises:
        ValueError: The model type or a field is unknown, or a value is not accepted.
    """
    transformers = import_optional("transformers")

    check_sizes(sizes, "config.")
    values = dict(sizes)
    name = values.pop("model_type", "")
    if name not in transformers.CONFIG_MAPPING:
        known = list(transformers.CONFIG_MAPPING)
        raise ValueError(
            f"config.model_type={name!r} is not a model of transformers "
            f"{transformers.__version__}{nearest(str(name), known)}"
        )
    kind = transformers.CONFIG_MAPPING[name]
    try:
        config = kind(**values)
        known = vars(kind())
    except Exception as error:  # the checks of transformers raise many types
        raise ValueError(
            f"config: {kind.__name__} does not accept these fields: {one_line(error)}"
        ) from error
    if undeclared := [name for name in values if name in vars(config) and name not in known]:
        # Some models read fields that their configuration does not declare (Qwen3-MoE: head_dim).
        model = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
        words = set(_WORD.findall(inspect.getsource(model)))
        if unknown := [name for name in undeclared if name not in words]:
            raise ValueError(
                f"config.{unknown[0]} is not a field of "
                f"{kind.__name__}{nearest(unknown[0], [*known, *kind.attribute_map])}"
            )
    return config


def check_causal(config: Any, *, option: str) -> None:
    """Refuse an encoder such as BERT as a causal language model.

    transformers builds such a model without an error, but its tokens see later tokens.

    Args:
        config: Configuration of transformers.
        option: Option of the user, for messages.

    Raises:
        ValueError: The model's attention is not causal.
    """
    transformers = import_optional("transformers")
    is_encoder = (
        type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    )
    if is_encoder and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"{option} is a {config.model_type} model with is_decoder=False, so its tokens "
            "attend to later ones, which a causal language model has to predict. Use "
            'LitMaskedLM, or set "is_decoder": true in config.json'
        )


def without_values(kind: Any, config: Any, *, option: str, **options: Any) -> Any:
    """Build a model on the meta device.

    This takes no memory, and detects models that cannot be built.

    Args:
        kind: The Auto class.
        config: Configuration of transformers.
        option: Option of the user, for messages.
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
                f"{option} has a model of type {config.model_type!r}, which {kind.__name__} does "
                "not support. Use LitCausalLM for a causal language model, LitMaskedLM for an "
                "encoder, and your own LightningModule for other models"
            ) from None
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{option}: the model of its configuration cannot be built ({why})"
        ) from error


def with_values(kind: Any, config: Any, weights: str | None, *, option: str, **options: Any) -> Any:
    """Build a model with the weights of a folder or of the hub.

    Without ``weights``, the model has initial values.

    Raises:
        ValueError: The weights are missing or damaged, or have other shapes than the configuration
            describes.
    """
    if weights is None:
        return kind.from_config(config, trust_remote_code=False, **options)
    options |= {"config": config, "use_safetensors": True, "trust_remote_code": False}
    try:
        return kind.from_pretrained(local_folder(weights), **options).train()
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"{option}: the shapes of the weights differ from config.json") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{option}: the weights cannot be read ({one_line(error)})") from error


# ---- Checks of the numbers ---------------------------------------------------------------------


def check_sizes(config: Mapping[str, Any], where: str = "", *, stored: int | None = None) -> None:
    """Check the numbers of a ``config.json``, including those of inner configurations.

    Args:
        config: Content of the file.
        where: Prefix of a field in messages.
        stored: Number of tensors in its folder, if there are weights. Every layer has at least one.

    Raises:
        ValueError: A size is negative or not a whole number, a number is NaN, or there are more
            layers than tensors.
    """
    most_blocks = _MOST_BLOCKS if stored is None else max(stored, _FEW_BLOCKS)
    for name, value in _numbers(config):
        key = name.rpartition(".")[2]
        is_nan = isinstance(value, float) and math.isnan(value)
        if is_nan or (_EPSILON.search(key) and not 0 <= value < 1):
            raise ValueError(
                f"{where}{name}={value} is not a valid value. Give the number with which the "
                "model was trained"
            )
        is_size = _SIZE.search(key) or _BLOCKS.search(key)
        if is_size and (not 0 <= value <= _MOST_SIZE or value != int(value)):
            raise ValueError(
                f"{where}{name}={value} is not a valid size. Give an integer from 0 to {_MOST_SIZE}"
            )
        if _BLOCKS.search(key) and value > most_blocks:
            suffix = "" if stored is None else f", but there are only {stored} tensors of weights"
            raise ValueError(
                f"{where}{name}={value} is more than {most_blocks}{suffix}. Give the number of "
                "the model"
            )


def check_quantization(config: Mapping[str, Any], dtypes: Iterable[object]) -> None:
    """Check that weights are quantized if their ``config.json`` says so.

    Raises:
        ValueError: All dtypes are ordinary floating-point types.
    """
    entry = config.get("quantization_config")
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if entry and names and names <= {*_FLOATING}:
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise ValueError(
            f"it has quantization_config ({method!s:.40}), but the dtypes are "
            f"{', '.join(sorted(names))}. Remove this entry, or use the quantized weights"
        )


def _numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
