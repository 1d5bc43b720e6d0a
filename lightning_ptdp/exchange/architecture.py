"""Correspondence of an exported folder with the models of transformers.

Names and shapes are checked before the export, and logits after it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.checkpoint import CheckpointError, TensorReader, read_full
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.exchange.model_folder import read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.exchange.tensor_views import views_in_files

_SHOWN = 3
_LENGTH = 16
_CLOSE = 1e-4
"""Tolerance of logits, relative to the largest one.

Two implementations of a model add float32 numbers in different orders.
"""


def check_architecture(
    description: Mapping[str, Json],
    stored: Mapping[str, tuple[int, ...]],
    source: str,
    kind: Any = None,
    *,
    in_files: bool = False,
) -> Any:
    """Compare the tensors to export with the architecture that their configuration names.

    The architecture is built on the meta device.

    Args:
        description: Content of ``config.json``.
        stored: Name -> shape of every tensor.
        source: Origin of the tensors, for messages.
        kind: The model's class, if it is known.
        in_files: True if the names are those of files, which differ for some tensors from
            transformers' names in a model.

    Returns:
        The architecture.

    Raises:
        CheckpointError: transformers does not have the architecture or is not installed; a name is
            missing or unknown; or a shape differs.
    """
    name, kind = _architecture(description) if kind is None else (kind.__name__, kind)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file, torch.device("meta"):
            # JSON in a file may hold infinities.
            file.write(json.dumps(description))
            file.flush()
            model = kind(kind.config_class.from_json_file(file.name))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be built from the configuration: {error}") from error
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    first: dict[int, str] = {}
    tied = {
        key: first.setdefault(id(value), key)
        for key, value in model.named_parameters(remove_duplicate=False)
    }
    if in_files:
        untied = {key: shape for key, shape in expected.items() if tied.get(key, key) == key}
        expected = {key: view.shape for key, view in views_in_files(model, untied).items()}
    present = {tied.get(key, key) for key in stored}
    missing = sorted(
        key for key in expected if key not in stored and tied.get(key, key) not in present
    )
    unknown = sorted(stored.keys() - expected.keys())
    parts = []
    if missing:
        parts.append(f"lacks {_listed(missing)}")
    if unknown:
        parts.append(f"has the unknown {_listed(unknown)}")
    if parts:
        raise CheckpointError(
            f"{source} does not fit {name}: it {' and '.join(parts)}. Nothing was written. "
            "First merge adapters into the weights, or name the configuration and the prefix "
            "of the trained model"
        )
    for key, shape in stored.items():
        if expected[key] != shape:
            raise CheckpointError(
                f"{source} does not fit {name}: {key!r} has the shape {shape}, but "
                f"must have {expected[key]} according to the configuration"
            )
    return model


def verify_huggingface(
    source: PathLike,
    folder: PathLike,
    *,
    prefix: str,
    model: Model | None,
) -> str:
    """Load an exported folder as its users do, and compare it with the checkpoint.

    The comparison needs memory for two full models.

    Args:
        source: The checkpoint folder.
        folder: The exported folder.
        prefix: Prefix of the model's names in the checkpoint, with a dot.
        model: The native model, whose logits are compared. None: the module wraps a Hugging Face
            model, and every tensor is compared.

    Returns:
        The result, in words.

    Raises:
        CheckpointError: The folder and the checkpoint differ.
    """
    name, kind = _architecture(read_config(Path(folder)))
    hf_model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    problems = {
        key: sorted(map(str, info.get(key, ())))
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(problems.values()):
        message = "; ".join(f"{key} {_listed(names)}" for key, names in problems.items() if names)
        raise CheckpointError(f"{folder}: {name}.from_pretrained finds {message}")
    if model is None:
        state = hf_model.state_dict()
        reader = TensorReader(source)
        for stored in sorted(reader.metadata.names("model/")):
            key = stored.removeprefix(f"model/{prefix}")
            if key in state and not torch.equal(
                state[key], reader.read(stored).to(state[key].dtype)
            ):
                raise CheckpointError(f"{folder}: {key!r} differs from {source}")
        return f"{name}.from_pretrained loads it, every tensor equal"
    weights = {
        key.removeprefix(prefix): value
        for key, value in read_full(source).items()
        if key.startswith(prefix)
    }
    native = model.family.build(model.config)
    native.load_state_dict(weights)
    ids = (
        torch.arange(min(_LENGTH, model.config.sequence_length))[None]
        * 7
        % model.config.vocabulary_size
    )
    with torch.no_grad():
        logits = native.to(hf_model.dtype).float().eval()(ids)
        output = hf_model.float().eval()(ids)
    # BERT returns the logits of two heads.
    hf_logits = output["logits"] if "logits" in output else output["prediction_logits"]
    logits = logits[0] if isinstance(logits, tuple) else logits
    gap = float((logits - hf_logits).abs().max() / logits.abs().max())
    if not gap < _CLOSE:
        raise CheckpointError(
            f"{folder}: the logits of {name} differ from those of {source} by {gap:.1e} of the "
            "largest"
        )
    return f"the logits of {name} are equal, to {gap:.0e} of the largest"


def _architecture(description: Mapping[str, Json]) -> tuple[str, Any]:
    transformers = import_optional("transformers")
    names = description.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    kind = getattr(transformers, name, None) if name else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"the configuration's architectures={names!r} are unknown to transformers "
            f"{transformers.__version__}"
        )
    return name, kind


def _listed(names: list[str]) -> str:
    return listed([repr(name) for name in names], _SHOWN)
