"""What is in a Hugging Face folder: ``config.json``, and the weights as safetensors in one file or several with an index."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lightning_ptdp.checked_json import FILE_NAME, Json, flag, map_of, optional, record, text
from lightning_ptdp.checkpoint import CheckpointError, reading
from lightning_ptdp.exchange.safetensors import open_safetensors
from lightning_ptdp.untrusted import read_json, regular_size

__all__ = ["CONFIG_FILE", "INDEX_FILE", "ONE_FILE", "open_huggingface", "read_config", "reads_as_huggingface"]

CONFIG_FILE = "config.json"
ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3
_MOST_INDEX = 1 << 26  # bytes
_WEIGHT_MAP = record(others=True, weight_map=map_of(text(FILE_NAME, "the name of a file in this folder"), key=text()))
_ANY_MODEL = record(others=True, model_type=optional(text()), tie_word_embeddings=optional(flag))


def reads_as_huggingface(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a Hugging Face folder: a configuration beside safetensors."""
    return Path(path, CONFIG_FILE).is_file() and any(Path(path).glob("*.safetensors"))


def read_config(path: Path) -> dict[str, Json]:
    """What a ``config.json``, or the one in a folder, holds; what any model has is as it should be.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: a Hugging Face folder has a {CONFIG_FILE}")
    with reading(file):
        content: dict[str, Json] = read_json(file, linked=_blobs(file.parent))
        _ANY_MODEL(content)
    return content


def open_huggingface(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, mapped.

    Raises:
        CheckpointError: Files are missing or damaged, or do not hold what the index says.
    """
    if not (folder / INDEX_FILE).is_file():
        if not (folder / ONE_FILE).is_file():
            raise CheckpointError(f"{folder} has neither {ONE_FILE} nor {INDEX_FILE}: weights in other formats are not read")
        return _open_file(folder, ONE_FILE)
    with reading(folder / INDEX_FILE):
        where = _WEIGHT_MAP(read_json(folder / INDEX_FILE, most_bytes=_MOST_INDEX, linked=_blobs(folder)))["weight_map"]
    if not where:
        raise CheckpointError(f"{folder / INDEX_FILE} is damaged: it names no tensors")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(where.values())):
        found |= _open_file(folder, name)
    missing = sorted(where.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{folder} is damaged: {INDEX_FILE} names {missing[:_SHOWN]}, which no file holds")
    return {name: found[name] for name in where}


def _open_file(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if not os.path.lexists(folder / name):
        raise CheckpointError(f"{folder} is damaged: {INDEX_FILE} names {name}, which is not there")
    with reading(folder / name):
        regular_size(folder / name, linked=_blobs(folder))
    return open_safetensors(folder / name)


def _blobs(folder: Path) -> list[Path]:
    """Where the files of ``huggingface_hub``'s cache are, whose folders of a model (``snapshots/REVISION``) hold links only."""
    snapshots = Path(os.path.abspath(folder)).parent
    return [snapshots.parent / "blobs"] if snapshots.name == "snapshots" else []
