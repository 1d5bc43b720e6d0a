"""State dicts in one file: ``.pt``, ``.safetensors``, and the ``.ckpt`` that Lightning writes on one device."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    LocalRectangle,
    TensorReader,
    files,
    read_full,
    write_checkpoint,
)
from lightning_ptdp.checkpoint.saved import check_saved, why_unread
from lightning_ptdp.exchange.safetensors import open_safetensors, write_safetensors

__all__ = ["common_prefix", "converted", "from_state_dict", "open_state_dict", "to_state_dict", "weights_only_state"]

_SAFETENSORS = ".safetensors"
# What another run can use of a Lightning checkpoint; loops and callbacks belong to the optimizer's states, which are keyed by index.
_KEPT = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "hparams_name", "datamodule_hyper_parameters")


def open_state_dict(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The tensors of a file, mapped, and what else a Lightning checkpoint says of itself.

    Raises:
        CheckpointError: The file is damaged, holds something else, or classes that ``weights_only=True`` refuses.
    """
    file = Path(path)
    if file.suffix == _SAFETENSORS:
        return open_safetensors(file), {}
    try:
        with open(file, "rb") as stream:
            check_saved(stream)
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {why_unread(error)}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{file} holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{file} is not a state dict: {name!r:.80} is a {type(value).__name__}")
    return state, {key: content[key] for key in _KEPT if key in content}


def from_state_dict(source: str | os.PathLike[str], destination: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Write a checkpoint of ours from a ``.pt``, ``.safetensors`` or Lightning ``.ckpt`` file; bit for bit the same values.

    Args:
        source: The file. Names that share their memory in it are tied.
        destination: The checkpoint folder to make. It holds weights and hyperparameters, no state of training.
        prefix: Put in front of every name: the attribute that holds the model in the LightningModule, with a dot.

    Raises:
        CheckpointError: The file cannot be read.
    """
    tensors, state = open_state_dict(source)
    rectangles: list[LocalRectangle] = []
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, value in tensors.items():
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        known = first.setdefault(same, name) if value.numel() else name
        if known != name:
            aliases[prefix + name] = prefix + known
            continue
        rectangles.append(LocalRectangle.whole(f"model/{prefix}{name}", value))
    metadata = {"aliases": aliases, "converted_from": str(source)}
    write_checkpoint(destination, rectangles=rectangles, state={**weights_only_state({}), **state}, metadata=metadata)


def to_state_dict(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model of a checkpoint of ours as one state dict: ``.safetensors`` tensor by tensor, any other suffix by ``torch.save``.

    Args:
        source: The checkpoint folder.
        destination: The file; replaced if it is there.
        prefix: Taken away from the names; tensors whose names do not begin with it are left out.
        dtype: What floating-point tensors are converted to; default: as they are.

    Raises:
        CheckpointError: The checkpoint is damaged, or no name begins with ``prefix``.
    """
    reader, target = TensorReader(source), Path(os.path.abspath(destination))
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; name the file to write")
    stored = {name.removeprefix("model/"): name for name in sorted(reader.metadata.names("model/"))}
    stored |= {alias: stored[name] for alias, name in reader.metadata.aliases.items() if name in stored}
    names = {name.removeprefix(prefix): full for name, full in stored.items() if name.startswith(prefix)}
    if not names:
        raise CheckpointError(f"{source} holds no tensor whose name begins with {prefix!r}; there are {sorted(stored)[:3]}")
    with files.replacing(target) as part:
        if target.suffix == _SAFETENSORS:
            held = {name: reader.metadata.tensors[full] for name, full in names.items()}
            entries = {name: replace(entry, dtype=converted(entry.dtype, dtype)) for name, entry in held.items()}
            write_safetensors(part, entries, lambda name: reader.read(names[name]).to(entries[name].dtype))
        else:
            whole = read_full(source)
            values = {name: whole[full.removeprefix("model/")] for name, full in names.items()}
            with files.open_synced(part) as stream:
                torch.save({name: value.to(converted(value.dtype, dtype)) for name, value in values.items()}, stream)


def common_prefix(names: set[str]) -> str:
    """The attribute that all names are in, with its dot; "" if there is none."""
    first = {name.partition(".")[0] for name in names if "." in name}
    return f"{next(iter(first))}." if len(first) == 1 and all("." in name for name in names) else ""


def weights_only_state(hyper_parameters: Mapping[str, object]) -> dict[str, object]:
    """Lightning's state of a checkpoint that was never trained."""
    state: dict[str, object] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
    }
    return state | ({"hyper_parameters": dict(hyper_parameters)} if hyper_parameters else {})


def converted(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a stored tensor if floating-point tensors are converted to ``wanted``."""
    return wanted if wanted is not None and stored.is_floating_point else stored
