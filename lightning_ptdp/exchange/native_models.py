"""Native models that Hugging Face has too: their choice by a configuration, and their folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from lightning_ptdp.checkpoint import CheckpointError, Stored, reading, write_checkpoint
from lightning_ptdp.checkpoint.remote_path import PathLike
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor
from lightning_ptdp.exchange.bert_weights import BERT, MEGATRON_BERT
from lightning_ptdp.exchange.folder_weights import HuggingFaceNames, HuggingFaceWeights, names_in
from lightning_ptdp.exchange.gpt_weights import GPT2, LLAMA, MIXTRAL
from lightning_ptdp.exchange.model_folder import CONFIG_FILE, list_huggingface, read_config
from lightning_ptdp.exchange.name_tables import Model, ModelTable
from lightning_ptdp.exchange.state_dict_files import weights_only_state
from lightning_ptdp.exchange.tensor_views import View

_SHOWN = 3
FAMILIES = (GPT2, LLAMA, MIXTRAL, BERT, MEGATRON_BERT)
Names = Literal["ptdp", "hf"]


def from_huggingface(
    source: PathLike,
    destination: PathLike,
    *,
    names: Names = "ptdp",
    prefix: str = "model.",
) -> None:
    """Write a checkpoint with the values of a Hugging Face folder, bit for bit.

    Args:
        source: The Hugging Face folder.
        destination: The checkpoint folder to create. It holds weights and no training state. Start
            from it with ``init_from`` (``ptdp fit --init_from``) or
            :func:`lightning_ptdp.checkpoint.load_tensors`.
        names: "ptdp" for the native model of that kind (``LitGPT``, ``LitBert``). "hf" keeps
            Hugging Face's names, for a LightningModule that wraps the Hugging Face model of any
            architecture.
        prefix: Attribute of the model in the LightningModule, with a dot.

    Raises:
        CheckpointError: The folder is damaged, lacks tensors, has an unsupported architecture (the
            message lists the supported ones), or has options that the native model lacks. Nothing
            is left at ``destination``.
    """
    folder = Path(source)
    tied: Mapping[str, str]
    if names == "hf":
        config = read_config(folder)
        weights = HuggingFaceWeights.open(folder, HuggingFaceNames(prefix=prefix, aliases={}))
        known = {family.model_type: family.hf_tied for family in FAMILIES}
        ties = config.get("tie_word_embeddings", True)
        tied = known.get(config.get("model_type") or "", {}) if ties else {}
        state = weights_only_state({})
    else:
        model, weights = _native_weights(folder, prefix)
        tied = model.aliases
        state = weights_only_state({"config": asdict(model.config)})
    present = weights.names
    aliases = {
        prefix + alias: prefix + name
        for alias, name in tied.items()
        if prefix + alias not in present and prefix + name in present
    }
    metadata = {"aliases": aliases, "converted_from": str(folder)}
    write_checkpoint(destination, rectangles=weights.rectangles(), state=state, metadata=metadata)


def weights_opener(
    module: nn.Module, aliases: Mapping[str, str], names: Iterable[str] | None = None
) -> Callable[[PathLike], Stored]:
    """Return a function that opens a Hugging Face folder for ``module``.

    The module wraps a Hugging Face model, or is native. If this rank holds only a part of the
    module, ``names`` are the names of all parameters.

    Raises:
        CheckpointError: The module holds several Hugging Face models.
    """
    if any(hasattr(type(child), "base_model_prefix") for child in module.modules()):
        return partial(HuggingFaceWeights.open, names=names_in(module, aliases, names=names))
    return open_native


def open_native(path: PathLike) -> HuggingFaceWeights:
    """Open a Hugging Face folder as the tensors of a native model in the attribute ``model``.

    Raises:
        CheckpointError: As for ``from_huggingface``.
    """
    return _native_weights(Path(path), "model.")[1]


def _native_weights(folder: Path, prefix: str) -> tuple[Model, HuggingFaceWeights]:
    """Return the native model of a Hugging Face folder, and the folder's tensors as its parts.

    The names of the tensors begin with ``prefix``.

    Raises:
        CheckpointError: As for ``from_huggingface``.
    """
    config = read_config(folder)
    found = list_huggingface(folder)
    family = family_of_config_json(config, folder / CONFIG_FILE)
    with reading(folder / CONFIG_FILE, "cannot be one of our models"):
        model = family.read(config)
    stored: dict[str, StoredTensor] = {}
    for name, value in found.items():
        if not family.is_ignored(name) and stored.setdefault(family.renamed(name), value) != value:
            raise CheckpointError(f"{folder} has {name!r} more than once, under different names")
    # A folder of the model without its head has names without the attribute of this model.
    bare = not any(name.startswith(family.base) for name in stored)
    shapes = model.shapes(stored=len(stored))
    parts: dict[str, list[tuple[StoredTensor, View]]] = {}
    missing = []
    for name, view in model.views(shapes):
        tensor = stored.pop(name.removeprefix(family.base) if bare else name, None)
        if tensor is None:
            missing.append(name)
            # The configuration may name far more experts than there are tensors.
            if len(missing) == _SHOWN:
                break
            continue
        if tensor.entry.shape != view.shape:
            raise CheckpointError(
                f"{folder}: {name!r} has the shape {tensor.entry.shape}, but must have "
                f"{view.shape} according to {CONFIG_FILE}"
            )
        parts.setdefault(f"model/{prefix}{view.name}", []).append((tensor, view))
    if missing:
        raise CheckpointError(f"{folder} lacks {missing}")
    tied = model.views({alias: shapes[name] for alias, name in model.aliases.items()})
    if unknown := sorted(stored.keys() - {name for name, _ in tied}):
        raise CheckpointError(
            f"{folder} has {unknown[:_SHOWN]}, which the model of its {CONFIG_FILE} does not have"
        )
    return model, HuggingFaceWeights(parts)


# ---- Choice of the model by a configuration ------------------------------------------------------


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
