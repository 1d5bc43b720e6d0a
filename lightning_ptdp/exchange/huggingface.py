"""Conversion of Hugging Face folders to checkpoints, from memory-mapped tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    InMemory,
    LocalRectangle,
    reading,
    write_checkpoint,
)
from lightning_ptdp.checkpoint.local_rectangles import check_cover
from lightning_ptdp.exchange.known_models import HF_TIED, family_of_config_json
from lightning_ptdp.exchange.model_folder import CONFIG_FILE, open_huggingface, read_config
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.exchange.state_dict_files import weights_only_state

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
        tensors = open_huggingface(folder)
        tied = (
            HF_TIED.get(config.get("model_type") or "", {})
            if config.get("tie_word_embeddings", True)
            else {}
        )
        aliases = {
            alias: name for alias, name in tied.items() if alias not in tensors and name in tensors
        }
        rectangles = [
            LocalRectangle.whole(f"model/{prefix}{name}", value) for name, value in tensors.items()
        ]
        state = weights_only_state({})
    else:
        model, rectangles = _our_rectangles(folder, f"model/{prefix}")
        aliases = model.aliases
        state = weights_only_state({"config": asdict(model.config)})
    metadata = {
        "aliases": {prefix + alias: prefix + name for alias, name in aliases.items()},
        "converted_from": str(folder),
    }
    write_checkpoint(destination, rectangles=rectangles, state=state, metadata=metadata)


def open_native(path: str | os.PathLike[str]) -> InMemory:
    """Open a Hugging Face folder as the native model's tensors, which are memory-mapped.

    Raises:
        CheckpointError: As for ``from_huggingface``.
    """
    return InMemory(_our_rectangles(Path(path), "model/model.")[1])


def _our_rectangles(folder: Path, prefix: str) -> tuple[Model, list[LocalRectangle]]:
    """Return the native model of a Hugging Face folder, and the folder's tensors as its parts.

    The tensors are memory-mapped. Their names begin with ``prefix``.

    Raises:
        CheckpointError: As for ``from_huggingface``.
    """
    config = read_config(folder)
    tensors = open_huggingface(folder)
    family = family_of_config_json(config, folder / CONFIG_FILE)
    with reading(folder / CONFIG_FILE, "cannot be one of our models"):
        model = family.read(config)
    rectangles = list(_rectangles(model, tensors, prefix))
    _check_complete(model, rectangles, prefix, folder)
    return model, rectangles


def _rectangles(
    model: Model, tensors: Mapping[str, torch.Tensor], prefix: str
) -> Iterator[LocalRectangle]:
    """Yield every Hugging Face tensor as a rectangle of a native tensor."""
    family = model.family
    bare = not any(name.startswith(family.base) for name in tensors)
    unknown = []
    for name, value in tensors.items():
        if family.is_ignored(name):
            continue
        part = model.place(name) or (model.place(family.base + name) if bare else None)
        if part is None:
            unknown.append(name)
            continue
        if part.ours in model.aliases:
            continue
        if value.dim() != 2 if part.transposed else part.rows is not None and not value.dim():
            raise CheckpointError(
                f"{name!r} has the shape {tuple(value.shape)}, but must be a matrix"
            )
        values = value.t() if part.transposed else value
        if part.rows is not None and values.shape[0] != part.rows:
            raise CheckpointError(
                f"{name!r} has {values.shape[0]} rows, but must have {part.rows} according to "
                f"{CONFIG_FILE}"
            )
        full_shape = (
            tuple(values.shape) if part.full_rows is None else (part.full_rows, *values.shape[1:])
        )
        if part.experts is not None:
            if part.expert >= part.experts:
                raise CheckpointError(
                    f"{name!r} belongs to an expert that does not exist, because {CONFIG_FILE} "
                    f"has {part.experts} experts"
                )
            full_shape = (part.experts, *full_shape)
            values = values[None]
        yield LocalRectangle(
            name=prefix + part.ours,
            full_shape=full_shape,
            offset=part.at(full_shape)[0].begin,
            values=values,
        )
    if unknown:
        raise CheckpointError(
            f"the table of {family.model_type!r} does not know "
            f"{', '.join(map(repr, unknown[:_SHOWN]))}"
        )


def _check_complete(
    model: Model, rectangles: list[LocalRectangle], prefix: str, folder: Path
) -> None:
    """Compare the rectangles with the model that the configuration describes."""
    shapes = model.shapes(stored=len(rectangles))
    duplicates = [
        key
        for key, count in Counter((part.name, part.offset) for part in rectangles).items()
        if count > 1
    ]
    if duplicates:
        raise CheckpointError(
            f"{folder} has {duplicates[0][0].removeprefix(prefix)!r} more than once, under "
            "different names"
        )
    actual = {part.name.removeprefix(prefix): part.full_shape for part in rectangles}
    missing = sorted(shapes.keys() - actual.keys())
    extra = sorted(actual.keys() - shapes.keys())
    if missing or extra:
        hf_names = [next(model.parts(name), (name,))[0] for name in missing[:_SHOWN]]
        more = f"has {extra[:_SHOWN]}, which the model of its {CONFIG_FILE} does not have"
        raise CheckpointError(f"{folder} {f'lacks {hf_names}' if missing else more}")
    for name, shape in shapes.items():
        if actual[name] != shape:
            raise CheckpointError(
                f"{folder}: {name!r} would have the shape {actual[name]}, but must have {shape} "
                f"according to {CONFIG_FILE}"
            )
        check_cover(
            name,
            shape,
            [part.place for part in rectangles if part.name == prefix + name],
            "to load",
        )
