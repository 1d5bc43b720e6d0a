"""State dicts in one file: ``.pt``, ``.safetensors``, and Lightning's ``.ckpt``.

Lightning writes a ``.ckpt`` file on one device.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptdp.checkpoint import (
    PARAMETER_NAMES,
    TYPES,
    CheckpointError,
    CheckpointMetadata,
    FileEntry,
    InMemory,
    LocalRectangle,
    TensorReader,
    files,
    with_types,
    write_checkpoint,
)
from lightning_ptdp.checkpoint.local_copies import readable
from lightning_ptdp.checkpoint.remote_path import PathLike, Place
from lightning_ptdp.checkpoint.single_file import file_to_write, save_synced
from lightning_ptdp.checkpoint.tensor_files import (
    load_saved,
    open_safetensors,
    write_safetensors,
)

_SAFETENSORS = ".safetensors"
# Entries of a Lightning checkpoint that another run can use. Loops and callbacks are left out,
# because they belong to the optimizer states, which are keyed by index.
_KEPT = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "hyper_parameters",
    "hparams_name",
    "datamodule_hyper_parameters",
    PARAMETER_NAMES,
    TYPES,
)


def open_state_dict(
    path: PathLike,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors of a file, memory-mapped, and the metadata of a Lightning checkpoint.

    Raises:
        CheckpointError: The file is damaged, is not a state dict, or has classes that
            ``weights_only=True`` rejects.
    """
    file = Path(readable(path))
    if file.suffix == _SAFETENSORS:
        return open_safetensors(file), {}
    content = load_saved(file)
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{file} contains a {type(state).__name__} instead of a state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{file} is not a state dict: {name!r:.80} is a {type(value).__name__}"
            )
    metadata = {key: content[key] for key in _KEPT if key in content}
    return state, with_types(metadata, file, types="keep")


def file_metadata(path: PathLike) -> CheckpointMetadata:
    """Return the metadata of a single file, like ``read_metadata`` for a folder.

    No tensor is read.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = Path(readable(path))
    state, metadata = open_state_dict(file)
    aliases = _tied(state)
    values = {f"model/{name}": value for name, value in state.items() if name not in aliases}
    for number, optimizer in enumerate(load_saved(file).get("optimizer_states", ())):
        for index, entries in optimizer["state"].items():
            named = {f"optimizer/{number}/{key}/{index}": value for key, value in entries.items()}
            values |= {name: value for name, value in named.items() if isinstance(value, Tensor)}
    stat = file.stat()
    return CheckpointMetadata(
        run={
            **{key: value for key, value in metadata.items() if isinstance(value, int)},
            "aliases": aliases,
        },
        packages={"lightning": str(metadata.get("pytorch-lightning_version", "unknown"))},
        tensors=InMemory(values).tensors,
        files={file.name: FileEntry(size=stat.st_size)},
        created=stat.st_mtime,
    )


def verify_file(path: PathLike) -> CheckpointMetadata:
    """Verify every byte of a single file against the checksums that ``torch.save`` wrote.

    Returns:
        The ``file_metadata`` of the file.

    Raises:
        CheckpointError: The file is damaged.
    """
    metadata = file_metadata(path)
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
    return metadata


@contextmanager
def as_folder(source: PathLike, *, target: PathLike) -> Iterator[Place]:
    """Return a context with a checkpoint folder that has the weights of ``source``.

    The folder is ``source`` itself, or a temporary conversion of a single file.

    Args:
        source: A checkpoint folder, or a Lightning ``.ckpt`` file.
        target: The temporary folder has the same parent as this path, whose file system must have
            room for it.

    Raises:
        CheckpointError: The file cannot be read.
    """
    place = readable(source)
    if not isinstance(place, Path) or not place.is_file():
        yield place
        return
    parent = files.local_path(target).parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ptdp-", dir=parent) as scratch:
        from_state_dict(place, Path(scratch) / place.name)
        yield Path(scratch) / place.name


def from_state_dict(source: PathLike, destination: PathLike, *, prefix: str = "") -> None:
    """Write a checkpoint with the values of a single file, bit for bit.

    Args:
        source: A ``.pt``, ``.safetensors`` or Lightning ``.ckpt`` file. Names that share their
            memory in it are tied.
        destination: The checkpoint folder to create. It holds weights and hyperparameters, and no
            training state.
        prefix: Prefix added to every name: the attribute of the model in the LightningModule, with
            a dot.

    Raises:
        CheckpointError: The file cannot be read.
    """
    tensors, state = open_state_dict(source)
    tied = _tied(tensors)
    rectangles = [
        LocalRectangle.full(f"model/{prefix}{name}", value)
        for name, value in tensors.items()
        if name not in tied
    ]
    aliases = {prefix + name: prefix + original for name, original in tied.items()}
    metadata = {"aliases": aliases, "converted_from": str(source)}
    state = {
        **weights_only_state({}),
        **{key: value for key, value in state.items() if key != PARAMETER_NAMES},
    }
    write_checkpoint(destination, rectangles=rectangles, state=state, metadata=metadata)


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the further names of tensors that share their memory -> the first name."""
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, value in tensors.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        original = first.setdefault(key, name) if value.numel() else name
        if original != name:
            aliases[name] = original
    return aliases


def to_state_dict(
    source: PathLike,
    destination: PathLike,
    *,
    prefix: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model of a checkpoint as one state dict.

    A ``.safetensors`` file is written tensor by tensor, and a file with any other suffix by
    ``torch.save``.

    Args:
        source: The checkpoint folder.
        destination: The file. An existing file is replaced.
        prefix: Prefix removed from the names. Tensors without it are left out.
        dtype: Dtype of the written floating-point tensors; default: as stored.

    Raises:
        CheckpointError: The checkpoint is damaged, or no name begins with ``prefix``.
    """
    reader = TensorReader(source)
    target = file_to_write(destination)
    stored = reader.model_names()
    names = {
        name.removeprefix(prefix): full for name, full in stored.items() if name.startswith(prefix)
    }
    if not names:
        raise CheckpointError(
            f"{source} has no tensor whose name starts with {prefix!r}; it has {sorted(stored)[:3]}"
        )
    with files.replacing(target) as part:
        if target.suffix == _SAFETENSORS:
            write_converted(part, reader, names, dtype)
        else:
            weights = {
                full: value.to(converted(value.dtype, dtype))
                for full, value in reader.read_all(set(names.values())).items()
            }
            save_synced({name: weights[full] for name, full in names.items()}, part)


def write_converted(
    path: Path,
    reader: TensorReader,
    names: Mapping[str, str],
    dtype: torch.dtype | None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors of a checkpoint as a safetensors file, one after the other.

    Args:
        path: The file.
        reader: Reader of the checkpoint.
        names: Name in the file -> name in the checkpoint.
        dtype: Dtype of the floating-point tensors; None: as stored.
        metadata: Text for the header.
    """
    stored = {name: reader.tensors[full] for name, full in names.items()}
    entries = {
        name: replace(entry, dtype=converted(entry.dtype, dtype)) for name, entry in stored.items()
    }
    write_safetensors(
        path,
        entries,
        lambda name: reader.read(names[name]).to(entries[name].dtype),
        metadata=metadata,
    )


def common_prefix(names: set[str]) -> str:
    """Return the attribute that all names begin with, with its dot, or "" if there is none."""
    first = {name.partition(".")[0] for name in names if "." in name}
    return f"{next(iter(first))}." if len(first) == 1 and all("." in name for name in names) else ""


def weights_only_state(hyper_parameters: Mapping[str, object]) -> dict[str, object]:
    """Return Lightning's state for a checkpoint without training."""
    state: dict[str, object] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
    }
    return state | ({"hyper_parameters": dict(hyper_parameters)} if hyper_parameters else {})


def converted(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return ``wanted`` for a floating-point dtype, if given, else the stored dtype."""
    return wanted if wanted is not None and stored.is_floating_point else stored
