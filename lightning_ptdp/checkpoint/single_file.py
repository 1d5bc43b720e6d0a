"""Lightning's single file: written if one rank holds the whole model, or made from a folder.

The file is written like Lightning's own, and any layout can read it. Its optimizer states are keyed
by position. The file also stores the names of the parameters, so that a layout that holds only a
part of the parameters finds its own states. A folder is read in one process as if it were such a
file, with the whole model under ``"state_dict"``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pickle
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.metadata import METADATA_FILE, STATE_FILE
from lightning_ptdp.checkpoint.reader import MODEL, TensorReader
from lightning_ptdp.checkpoint.remote_path import PathLike, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError
from lightning_ptdp.checkpoint.saved_state import (
    HYPERPARAMETERS,
    LEFT_OUT,
    TRAINING,
    MapLocation,
    mapped,
    read_state,
    warn_unread,
    with_objects,
)
from lightning_ptdp.checkpoint.tagged_json import decode, encode, portable

PARAMETER_NAMES = "lightning_ptdp_parameters"
"""Key of the names of each optimizer's parameters, group by group."""
TYPES = "lightning_ptdp_types"
"""Key of the values whose types a plain file does not keep, encoded: key, name -> value."""
_TENSORS = ("state_dict", "optimizer_states")
_UNPICKLABLE = (AttributeError, TypeError, pickle.PicklingError)


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint so that ``path`` always holds the complete old or the complete new one.

    This also holds after a power failure.

    Raises:
        CheckpointError: The disk does not accept the file, or ``path`` is a folder with other
            content.
    """
    files.check_replaceable(path, marker=METADATA_FILE, or_file=True)
    checkpoint = _plain_where_possible(checkpoint)
    with files.replacing(path) as part:
        try:
            try:
                save_synced(checkpoint, part)
            except _UNPICKLABLE as error:
                # Like Lightning, save the weights even if the user's objects cannot be pickled.
                picklable = {
                    key: value for key, value in checkpoint.items() if key not in HYPERPARAMETERS
                }
                save_synced(picklable, part)
                warnings.warn(
                    f"{path} is saved without hyperparameters, because they cannot be pickled: "
                    f"{error}",
                    stacklevel=2,
                )
        except _UNPICKLABLE as error:
            raise CheckpointError(f"writing {path} failed: {error}") from error


def _plain_where_possible(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with plain values in place of those that ``weights_only`` refuses.

    The values with their types are added in encoded form. Objects are kept, as in Lightning's own
    file.
    """
    plain: dict[str, Any] = dict(checkpoint)
    types: dict[str, dict[str, Any]] = {}
    for key, value in checkpoint.items():
        if key in _TENSORS or type(value) is not dict:
            continue
        plain[key] = dict(value)
        for name, item in value.items():
            with suppress(CheckpointError):
                encoded = encode(item, "")
                plain[key][name] = decode(encoded.text, encoded.tensors, types="plain")[0]
                if not encoded.is_plain:
                    types.setdefault(key, {})[name] = (encoded.text, encoded.tensors)
    return {**plain, TYPES: types} if types else plain


def with_types(
    checkpoint: Mapping[str, Any], where: object, *, types: Literal["restore", "keep"] = "restore"
) -> dict[str, Any]:
    """Return the content of a file with the types that it has in encoded form.

    Args:
        checkpoint: The content.
        where: Path of the file, for messages.
        types: See :func:`decode`.

    Raises:
        CheckpointError: The encoded form is damaged.
    """
    content = {key: value for key, value in checkpoint.items() if key != TYPES}
    unread: set[str] = set()
    try:
        for key, encoded in checkpoint.get(TYPES, {}).items():
            content[key] = dict(content[key])
            for name, (text, tensors) in encoded.items():
                content[key][name], missing = decode(text, tensors, types=types)
                unread |= missing
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: its {TYPES}: {error}") from error
    if types == "restore":
        warn_unread(unread, where)
    return content


def save_synced(content: Mapping[str, Any], path: Path) -> None:
    """Write a file of ``torch.save``, and wait until the disk has it."""
    with files.open_synced(path) as stream:
        torch.save(dict(content), stream)


# ---- A folder, read in one process like such a file ----------------------------------------------


class StoredWeights(MutableMapping[str, Tensor]):
    """The ``state_dict`` of the whole model, read tensor by tensor on access.

    Tied parameters have all their names.

    Args:
        path: The checkpoint folder.

    Attributes:
        path: The checkpoint folder.
        touched: True if an entry was read or changed, so that the stored values may differ from the
            intended ones.

    Raises:
        CheckpointError: The folder is not a checkpoint, or its index is damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = located(path)
        self.touched = False
        reader = TensorReader(path)
        self._stored = reader.model_names()
        self._values: dict[str, Tensor | None] = dict.fromkeys(self._stored)
        # Tied parameters stay one tensor.
        self._read = functools.cache(reader.read)

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name]
        self.touched = True
        if value is None:
            value = self._values[name] = self._read(self._stored[name])
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.touched = True
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self.touched = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"StoredWeights({len(self)} tensors of {self.path})"

    def copy(self) -> dict[str, Tensor]:
        """Return an ordinary dictionary."""
        return dict(self)

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (self.copy(),)


class StoredOptimizers(list[dict[str, Any]]):
    """The parameter groups of a checkpoint's optimizers.

    Their tensors are in the folder ``path``, under the names of the parameters.
    """

    def __init__(self, states: list[dict[str, Any]], path: PathLike) -> None:
        super().__init__(states)
        self.path = located(path)


class _RefusedOptimizers(StoredOptimizers):
    """Stored optimizer states that refuse the access by position of Lightning's strategies."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise CheckpointError(
            f"{self.path} stores optimizer states under the names of their parameters, which "
            'this strategy cannot read. Resume from it with Trainer(strategy="ptdp"), which '
            "also runs on one device"
        )


def is_checkpoint(path: PathLike) -> bool:
    """Return True if a folder is a checkpoint of this package, possibly a torn one."""
    return any((located(path) / name).exists() for name in (METADATA_FILE, STATE_FILE))


def read_whole(
    path: PathLike, map_location: MapLocation = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Return a checkpoint folder like ``torch.load`` returns Lightning's single file.

    The function needs no process group. The folder keys optimizer states by name, so that iterating
    over the entry ``"optimizer_states"`` raises an error that says so.

    Args:
        path: The checkpoint folder.
        map_location: Devices of the tensors, as for ``torch.load``. The stored tensors count as the
            CPU's.
        trusted: True to unpickle hyperparameters that are objects, which executes their content.

    Raises:
        CheckpointError: The folder is incomplete or damaged.
    """
    state = read_state(path, map_location=map_location)
    if trusted:
        state = with_objects(state)
    _warn_left_out(state, path, or_trust=", or use weights_only=False if you trust the checkpoint")
    if state.get("optimizer_states") is not None:
        state["optimizer_states"] = _RefusedOptimizers(state["optimizer_states"], path)
    moved: dict[int, Tensor] = {}  # Tied parameters stay one tensor.
    weights = read_full(path)
    return {
        **state,
        "state_dict": {
            n: moved.setdefault(id(value), mapped(value, map_location))
            for n, value in weights.items()
        },
    }


def _warn_left_out(state: Mapping[str, Any], path: PathLike, *, or_trust: str = "") -> None:
    for key, names in state.get(LEFT_OUT, {}).items():
        objects = ", ".join(
            f"{name} (a {kind})" if name else f"all (a {kind})" for name, kind in names.items()
        )
        warnings.warn(
            f"{path} is read without these {key}, which are objects: {objects}. Pass them by name "
            f"(load_from_checkpoint(path, name=...)){or_trust}",
            stacklevel=3,
        )


def read_full(path: PathLike, prefix: str = MODEL) -> dict[str, Tensor]:
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


def to_lightning_file(source: PathLike, destination: PathLike) -> None:
    """Write Lightning's single-file checkpoint from a checkpoint folder.

    ``LightningModule.load_from_checkpoint`` reads the file. It holds the weights, the
    hyperparameters, and the state of loops and callbacks. It does not hold the optimizer states,
    which Lightning keys by position and this package by name, nor hyperparameters that are objects,
    which a warning names.

    Args:
        source: A checkpoint folder.
        destination: The file to write. An existing file is replaced.

    Raises:
        CheckpointError: The source is damaged, or the destination is a folder.
    """
    target = file_to_write(destination)
    state = read_state(source)
    _warn_left_out(state, source)
    checkpoint = {
        key: portable(value, key)
        for key, value in state.items()
        if not key.startswith("lightning_ptdp") and key not in TRAINING
    }
    checkpoint.setdefault("pytorch-lightning_version", importlib.metadata.version("lightning"))
    checkpoint["state_dict"] = read_full(source)
    with files.replacing(target) as part:
        save_synced(checkpoint, part)


def file_to_write(destination: PathLike) -> Path:
    """Return the absolute path of a file to write.

    Raises:
        CheckpointError: It is a folder, or is not on a mounted file system.
    """
    target = files.local_path(destination)
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder. Give the path of the file to write")
    files.check_replaceable(target, marker=METADATA_FILE, or_file=True)
    return target
