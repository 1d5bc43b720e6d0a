"""Content of an export: the names of its tensors, its ``config.json``, and the files beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_ptdp.base.checked_json import Json
from lightning_ptdp.checkpoint import CheckpointError, TensorEntry
from lightning_ptdp.exchange.architecture import check_architecture
from lightning_ptdp.exchange.conversions import View, views_in_files
from lightning_ptdp.exchange.export_writer import Item
from lightning_ptdp.exchange.known_models import model_of_hyper_parameters
from lightning_ptdp.exchange.model_folder import CONFIG_FILE, read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.exchange.state_dict_files import common_prefix, converted
from lightning_ptdp.exchange.tokenizers import files_beside, tokenizer_of
from lightning_ptdp.models.pretrained_folder import config_of_sizes, local_folder

__all__ = ["MODEL", "Described", "described_by_folder", "described_by_module", "described_by_state"]

MODEL = "model/"
"""Prefix of the module's tensors in a checkpoint."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model that is exported, whatever its values.

    Attributes:
        config: Its ``config.json``.
        documents: Files that go along: name -> content.
        ours: It is one of our own; None: a module wraps theirs, and what transformers calls its
            tensors.
        kind: Their class, where it is known; None: the one that ``config`` names.
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
        """Every tensor of theirs, in the order in which they are stored.

        Args:
            entries: Tensors of ours, by their names in a checkpoint.
            prefix: Name of the model's attribute in the LightningModule, with a dot. Default: what
                all names begin with.
            dtype: What floating-point tensors are converted to.
            source: What has them, for messages.

        Raises:
            CheckpointError: There are none, or they are not those of the model, as Hugging Face
                makes it of the configuration.
        """
        names = {name.removeprefix(MODEL) for name in entries if name.startswith(MODEL)}
        prefix = common_prefix(names) if prefix is None else prefix
        if not any(name.startswith(prefix) for name in names):
            raise CheckpointError(
                f"{source} holds no tensor whose name begins with {prefix!r}; there are "
                f"{sorted(names)[:_SHOWN]}"
            )
        if self.ours is not None:
            found = dict(_our_items(self.ours, entries, prefix, dtype, source))
            if find_spec("transformers") is not None:  # they have been compared with their table
                check_architecture(
                    self.config,
                    {name: item.entry.shape for name, item in found.items()},
                    source,
                    in_files=True,
                )
            return found
        shapes = {
            name.removeprefix(prefix): entries[MODEL + name].shape
            for name in names
            if name.startswith(prefix)
        }
        views = views_in_files(check_architecture(self.config, shapes, source, self.kind), shapes)
        return {name: _item(entries, prefix, views[name], dtype) for name in sorted(views)}

    def files(self, items: Mapping[str, Item]) -> dict[str, bytes]:
        """All but the tensors: name -> content."""
        kinds = [item.entry.dtype for item in items.values() if item.entry.dtype.is_floating_point]
        config = {
            name: value for name, value in self.config.items() if name != "dtype"
        }  # what some versions call the next
        config |= {"torch_dtype": str(kinds[0]).removeprefix("torch.")} if kinds else {}
        return {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode(), **self.documents}


def described_by_folder(path: Path, state: Mapping[str, Any] | None = None) -> Described:
    """By a ``config.json``, or the Hugging Face folder that has it, with the files that are there,
    and the tokenizer that ``state`` names.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    return Described(config=read_config(path), documents=files_beside(path, state))


def described_by_state(state: Mapping[str, Any]) -> Described:
    """By what a checkpoint says of itself: the Hugging Face folder or configuration that its model
    was built from, or one of ours.

    Raises:
        CheckpointError: Of ``model_of_hyper_parameters``; or the folder is not there any more.
    """
    given = state.get("hyper_parameters", {})
    if isinstance(given.get("path"), str):
        try:
            return described_by_folder(local_folder(given["path"]), state)
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint's model was built from {given['path']}: {error}"
            ) from error
    sizes = given.get("config")
    if isinstance(sizes, Mapping) and "architectures" in sizes:
        try:
            return Described(
                config=json.loads(config_of_sizes(sizes).to_json_string()),
                documents=tokenizer_of(state),
            )
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's model: {error}") from error
    model = model_of_hyper_parameters(given)
    return Described(config=model.write(), documents=tokenizer_of(state), ours=model)


def described_by_module(model: Any, state: Mapping[str, Any]) -> Described:
    """By a Hugging Face model, whatever part of it is here. The files of the folder that its
    configuration was read from go along, with the tokenizer that ``state``, as a checkpoint would
    have it, says that it was trained with."""
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    config |= (
        {"use_cache": True} if "use_cache" in config else {}
    )  # it is False while a model is trained
    documents = (
        {"generation_config.json": model.generation_config.to_json_string().encode()}
        if model.can_generate()
        else {}
    )
    if model.config.name_or_path:
        with contextlib.suppress(ValueError):
            documents |= files_beside(local_folder(model.config.name_or_path), state)
    else:
        documents |= tokenizer_of(state)
    return Described(config=config, documents=documents, kind=type(model))


def _our_items(
    model: Model,
    entries: Mapping[str, TensorEntry],
    prefix: str,
    dtype: torch.dtype | None,
    source: str,
) -> Iterator[tuple[str, Item]]:
    shapes = model.shapes(stored=len(entries))
    wanted = {f"{MODEL}{prefix}{name}" for name in (*shapes, *model.aliases)}
    if other := sorted(
        name for name in entries if name.startswith(f"{MODEL}{prefix}") and name not in wanted
    ):
        raise CheckpointError(
            f"{source} has {other[0].removeprefix(MODEL)!r}, which its hyperparameters' model has "
            "not: merge adapters into the "
            "weights first"
        )
    for name, shape in shapes.items():
        if f"{MODEL}{prefix}{name}" not in entries:
            raise CheckpointError(
                f"{source} has no {prefix + name!r}, which its hyperparameters' model has"
            )
        if (found := tuple(entries[f"{MODEL}{prefix}{name}"].shape)) != shape:
            raise CheckpointError(
                f"{prefix + name!r} has the shape {found}, which its hyperparameters make {shape}"
            )
        for theirs, part in model.parts(name):
            place, dims = part.at(shape)
            yield theirs, _item(entries, prefix, View(name=name, place=place, dims=dims), dtype)


def _item(
    entries: Mapping[str, TensorEntry], prefix: str, view: View, dtype: torch.dtype | None
) -> Item:
    stored = f"{MODEL}{prefix}{view.name}"
    entry = TensorEntry(shape=view.shape, dtype=converted(entries[stored].dtype, dtype))
    return Item(stored=stored, view=view, entry=entry)
