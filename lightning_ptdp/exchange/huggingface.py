"""Reader of Hugging Face folders for native models, and their conversion to checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from lightning_ptdp.checkpoint import CheckpointError, Stored, reading, write_checkpoint
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor
from lightning_ptdp.exchange.folder_weights import HuggingFaceNames, HuggingFaceWeights, names_in
from lightning_ptdp.exchange.known_models import HF_TIED, family_of_config_json
from lightning_ptdp.exchange.model_folder import CONFIG_FILE, list_huggingface, read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.exchange.state_dict_files import weights_only_state
from lightning_ptdp.exchange.tensor_views import View

_SHOWN = 3

Names = Literal["ptdp", "hf"]


def from_huggingface(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
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
    if names == "hf":
        config = read_config(folder)
        weights = HuggingFaceWeights.open(folder, HuggingFaceNames(prefix=prefix, aliases={}))
        ties = config.get("tie_word_embeddings", True)
        tied = HF_TIED.get(config.get("model_type") or "", {}) if ties else {}
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
) -> Callable[[str | os.PathLike[str]], Stored]:
    """Return a function that opens a Hugging Face folder for ``module``.

    The module wraps a Hugging Face model, or is native. If this rank holds only a part of the
    module, ``names`` are the names of all parameters.

    Raises:
        CheckpointError: The module holds several Hugging Face models.
    """
    if any(hasattr(type(child), "base_model_prefix") for child in module.modules()):
        return partial(HuggingFaceWeights.open, names=names_in(module, aliases, names=names))
    return open_native


def open_native(path: str | os.PathLike[str]) -> HuggingFaceWeights:
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
