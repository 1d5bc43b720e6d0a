"""Content of an export: names of tensors, ``config.json``, and the files beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.checkpoint import CheckpointError, TensorEntry
from lightning_ptdp.exchange.architecture import check_architecture
from lightning_ptdp.exchange.export_writer import Item
from lightning_ptdp.exchange.model_folder import CONFIG_FILE, read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.exchange.native_models import model_of_hyper_parameters
from lightning_ptdp.exchange.state_dict_files import common_prefix, converted
from lightning_ptdp.exchange.tensor_views import View, views_in_files
from lightning_ptdp.exchange.tokenizers import tokenizer_files, tokenizer_of
from lightning_ptdp.models.pretrained_config import config_of_sizes
from lightning_ptdp.models.pretrained_folder import local_folder

MODEL = "model/"
"""Prefix of the module's tensors in a checkpoint."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Described:
    """Description of a model to export, without its values.

    Attributes:
        config: Content of ``config.json``.
        documents: Additional files: name -> content.
        ours: The native model. None: the module wraps a Hugging Face model, whose names it keeps.
        kind: Class of the Hugging Face model, if it is known; None: the one that ``config`` names.
    """

    config: Mapping[str, Json]
    documents: Mapping[str, bytes]
    ours: Model | None = None
    kind: type[nn.Module] | None = None

    def items(
        self,
        entries: Mapping[str, TensorEntry],
        *,
        prefix: str | None,
        dtype: torch.dtype | None,
        source: str,
    ) -> dict[str, Item]:
        """Return every Hugging Face tensor, in the order of storage.

        Args:
            entries: The native tensors, by their names in a checkpoint.
            prefix: Attribute of the model in the LightningModule, with a dot. Default: the common
                prefix of all names.
            dtype: Dtype of the written floating-point tensors; None: as stored.
            source: Origin of the tensors, for messages.

        Raises:
            CheckpointError: There are no tensors, or they are not those of the model that Hugging
                Face builds from the configuration.
        """
        names = {name.removeprefix(MODEL) for name in entries if name.startswith(MODEL)}
        prefix = common_prefix(names) if prefix is None else prefix
        beginning = MODEL + prefix
        stored = {
            name.removeprefix(beginning): entry
            for name, entry in entries.items()
            if name.startswith(beginning)
        }
        if not stored:
            raise CheckpointError(
                f"{source} has no tensor whose name starts with {prefix!r}; it has "
                f"{sorted(names)[:_SHOWN]}"
            )
        if self.ours is None:
            shapes = {name: entry.shape for name, entry in stored.items()}
            architecture = check_architecture(self.config, shapes, source, self.kind)
            views = dict(sorted(views_in_files(architecture, shapes).items()))
        else:
            views = _views_of_native(self.ours, stored, prefix, source)
            # The native model has been compared; transformers adds a second check.
            if find_spec("transformers") is not None:
                shapes = {name: view.shape for name, view in views.items()}
                check_architecture(self.config, shapes, source, in_files=True)
        items = {}
        for name, view in views.items():
            entry = TensorEntry(shape=view.shape, dtype=converted(stored[view.name].dtype, dtype))
            items[name] = Item(stored=beginning + view.name, view=view, entry=entry)
        return items

    def files(self, items: Mapping[str, Item]) -> dict[str, bytes]:
        """Return all files except those of the tensors: name -> content."""
        dtypes = [item.entry.dtype for item in items.values() if item.entry.dtype.is_floating_point]
        # Some versions of transformers call ``torch_dtype`` ``dtype``.
        config = {name: value for name, value in self.config.items() if name != "dtype"}
        config |= {"torch_dtype": str(dtypes[0]).removeprefix("torch.")} if dtypes else {}
        return {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(), **self.documents}


def described_by_folder(path: Path, state: Mapping[str, Any] | None = None) -> Described:
    """Return the description of a model from its ``config.json`` or its folder.

    The files beside the configuration are included, and the tokenizer that ``state`` names.

    Raises:
        CheckpointError: The configuration is missing or damaged.
    """
    return Described(config=read_config(path), documents=tokenizer_files(path, state))


def described_by_state(state: Mapping[str, Any]) -> Described:
    """Return the description of a checkpoint's model from the checkpoint's state.

    The state names a native configuration, or the Hugging Face folder or configuration that the
    model was built from.

    Raises:
        CheckpointError: As for ``model_of_hyper_parameters``, or the folder no longer exists.
    """
    hparams = state.get("hyper_parameters", {})
    if isinstance(hparams.get("path"), str):
        try:
            return described_by_folder(local_folder(hparams["path"]), state)
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint's model was built from {hparams['path']}: {error}"
            ) from error
    sizes = hparams.get("config")
    if isinstance(sizes, Mapping) and "architectures" in sizes:
        try:
            return Described(
                config=json.loads(config_of_sizes(sizes).to_json_string()),
                documents=tokenizer_of(state),
            )
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's model: {error}") from error
    model = model_of_hyper_parameters(hparams)
    return Described(config=model.write(), documents=tokenizer_of(state), ours=model)


def described_by_module(model: Any, state: Mapping[str, Any]) -> Described:
    """Return the description of a Hugging Face model, of which this rank may hold only a part.

    The export includes the files of the folder that the configuration was read from. ``state`` has
    the form of a checkpoint's state and names the tokenizer of the training data.
    """
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    # ``use_cache`` is False during training.
    config |= {"use_cache": True} if "use_cache" in config else {}
    documents = (
        {"generation_config.json": model.generation_config.to_json_string().encode()}
        if model.can_generate()
        else {}
    )
    if model.config.name_or_path:
        with contextlib.suppress(ValueError):
            documents |= tokenizer_files(local_folder(model.config.name_or_path), state)
    else:
        documents |= tokenizer_of(state)
    return Described(config=config, documents=documents, kind=type(model))


def _views_of_native(
    model: Model, stored: Mapping[str, TensorEntry], prefix: str, source: str
) -> dict[str, View]:
    """Return the parts of a native model's tensors by their Hugging Face names.

    Raises:
        CheckpointError: The stored tensors are not those of the model.
    """
    shapes = model.shapes(stored=len(stored))
    if unexpected := sorted(stored.keys() - shapes.keys() - model.aliases.keys()):
        raise CheckpointError(
            f"{source} has {prefix + unexpected[0]!r}, which the model of its "
            "hyperparameters does not have. First merge adapters into the weights"
        )
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(
                f"{source} has no {prefix + name!r}, which the model of its hyperparameters has"
            )
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{source}: {prefix + name!r} has the shape {stored[name].shape}, but its "
                f"hyperparameters need {shape}"
            )
    return dict(model.views(shapes))
