"""Whole tensors, and Lightning's single file, from a checkpoint in one process."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import torch

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.reader import MODEL, TensorReader
from lightning_ptdp.checkpoint.saved_state import read_state
from lightning_ptdp.checkpoint.tagged_json import portable

__all__ = ["read_full", "to_lightning_file"]


def read_full(path: str | os.PathLike[str], prefix: str = MODEL) -> dict[str, torch.Tensor]:
    """Return the full tensors whose global names begin with ``prefix``; not collective.

    The tensors are on the CPU, and their names lack the prefix. With the model's prefix, the result
    is its ``state_dict``: tied parameters have all their names, and share their tensor.

    Raises:
        CheckpointError: The checkpoint is damaged, or no name has the prefix.
    """
    reader = TensorReader(path)
    names = {name.removeprefix(prefix): name for name in sorted(reader.metadata.names(prefix))}
    names = reader.model_names() if prefix == MODEL else names
    if not names:
        kinds = sorted({name.split("/", 1)[0] + "/" for name in reader.tensors})
        raise CheckpointError(
            f"{path} has no tensor whose name starts with {prefix!r}; it has {kinds}"
        )
    stored = reader.read_all(set(names.values()))
    return {name: stored[full] for name, full in names.items()}


def to_lightning_file(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Write Lightning's single-file checkpoint from a checkpoint folder.

    ``LightningModule.load_from_checkpoint`` reads the file. It holds the weights, the
    hyperparameters, and the state of loops and callbacks. It does not hold the optimizer states,
    which Lightning keys by position and this package by name.

    Args:
        source: A checkpoint folder.
        destination: The file to write. An existing file is replaced.

    Raises:
        CheckpointError: The source is damaged, or the destination is a folder.
    """
    target = Path(os.path.abspath(destination))
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder. Give the path of the file to write")
    state = {
        key: portable(value, key)
        for key, value in read_state(source).items()
        if not key.startswith("lightning_ptdp")
    }
    checkpoint = {
        key: value
        for key, value in state.items()
        if key not in ("optimizer_states", "lr_schedulers")
    }
    checkpoint.setdefault("pytorch-lightning_version", importlib.metadata.version("lightning"))
    checkpoint["state_dict"] = read_full(source)
    with files.replacing(target) as part, files.open_synced(part) as stream:
        torch.save(checkpoint, stream)
