"""``state.json``: all of a Lightning checkpoint that is not a sharded tensor.

The file holds no tensor. The tensors of the state are in the data files, like all others, under the
names ``state/0``, ``state/1``, …
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ptdp.base.checked_json import integer, list_of, map_of, optional, record, text
from lightning_ptdp.base.errors import listed
from lightning_ptdp.checkpoint.metadata import MOST_SMALL, STATE_FILE, read_verified
from lightning_ptdp.checkpoint.reader import TensorReader
from lightning_ptdp.checkpoint.remote_path import PathLike, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, reading
from lightning_ptdp.checkpoint.tagged_json import Encoded, decode, encode

STATE = "state/"
"""Prefix of the names of the state's tensors."""
TRAINING = ("optimizer_states", "lr_schedulers")
"""Keys of the state that belong to the optimizers, and are not part of a model."""
MapLocation = Callable[..., Any] | torch.device | str | Mapping[str, str] | None
_SHOWN = 5


def encode_state(state: dict[str, Any]) -> Encoded:
    """Return the content of ``state.json`` and its tensors, after they have been read back once.

    Raises:
        CheckpointError: A value cannot be stored. The message names its key.
    """
    encoded = encode(separate_objects(state), "state")
    try:
        _STATE(decode(encoded.text, encoded.tensors)[0])
    except ValueError as error:
        raise CheckpointError(f"state: {error}") from error
    if len(encoded.text) > MOST_SMALL:
        raise CheckpointError(
            f"state: its JSON has {len(encoded.text)} bytes, more than the limit of {MOST_SMALL}. "
            "Store long lists as tensors or arrays"
        )
    return encoded


def read_state(
    path: PathLike,
    *,
    map_location: MapLocation = None,
    types: Literal["restore", "keep"] = "restore",
) -> dict[str, Any]:
    """Return the Lightning state of a checkpoint; needs no process group.

    Args:
        path: The checkpoint folder.
        map_location: Devices of the tensors, as for ``torch.load``.
        types: See :func:`decode`.

    Raises:
        CheckpointError: ``path`` is not a complete checkpoint, or its state is damaged or refused.
    """
    reader = TensorReader(path)
    folder = reader.metadata.folder_in(located(path))
    content = read_verified(folder, reader.metadata, STATE_FILE)
    stored = reader.read_all(reader.metadata.names(STATE))
    with reading(folder / STATE_FILE):
        names = sorted(stored, key=lambda name: int(name.removeprefix(STATE)))
        tensors = [stored[name] for name in names]
        state, missing = decode(
            content, tensors, types=types, place=lambda value: mapped(value, map_location)
        )
        _STATE(state)
    if types == "restore":
        warn_unread(missing, folder)
    return state


def warn_unread(missing: Iterable[str], where: object) -> None:
    """Warn of classes that are not imported, whose values have become plain."""
    if names := sorted(missing):
        warnings.warn(
            f"{where} has values of {listed(names, _SHOWN)}, which "
            f"{'is' if len(names) == 1 else 'are'} not imported in this process, so they are read "
            "as plain values. Import the modules that define them before loading the checkpoint",
            stacklevel=3,
        )


def mapped(value: Tensor, map_location: MapLocation) -> Tensor:
    """Return a tensor of the CPU on the device that ``map_location`` names, as torch.load does."""
    if callable(map_location):
        storage = map_location(value.untyped_storage(), "cpu")
        return value if storage is None else value.to(storage.device)
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu", "cpu")
    return value if map_location is None else value.to(map_location)


_OBJECTS = optional(map_of(lambda value: value))
_GROUP = record(others=True, params=list_of(text()))
_STATE = record(
    others=True,
    epoch=optional(integer()),
    global_step=optional(integer()),
    loops=_OBJECTS,
    callbacks=_OBJECTS,
    hyper_parameters=_OBJECTS,
    optimizer_states=optional(list_of(record(others=True, groups=optional(list_of(_GROUP))))),
    lr_schedulers=optional(list_of(lambda value: value)),
    **{
        "pytorch-lightning_version": optional(
            text(r"\d{1,4}(\.\d{1,4})*[\w.+-]{0,40}", "a version")
        )
    },
)


# ---- Hyperparameters that are objects ------------------------------------------------------------
#
# They are not part of the plain state, which contains only their names. They are stored as bytes,
# and unpickled only for a caller that trusts the checkpoint.


LEFT_OUT, _PICKLED = "lightning_ptdp_left_out", "lightning_ptdp_objects"
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPE = "hparams_type"
_MOST_BYTES = 1 << 24


def left_out(hyperparameters: object) -> dict[str, str]:
    """Return the class names of hyperparameters that are not plain values, by key.

    The key "" represents all hyperparameters together.
    """
    if not isinstance(hyperparameters, dict):
        return {} if _is_plain(hyperparameters) else {"": _kind(hyperparameters)}
    return {
        str(key): _kind(value) for key, value in hyperparameters.items() if not _is_plain(value)
    }


def separate_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the objects among the hyperparameters as bytes, and their names."""
    names = {
        key: kinds for key in HYPERPARAMETERS if key in state and (kinds := left_out(state[key]))
    }
    if not names:
        return state
    plain, objects = dict(state), {}
    for key, kinds in names.items():
        if "" in kinds:
            del plain[key]
            objects[key] = state[key]
        else:
            plain[key] = {
                name: value for name, value in state[key].items() if str(name) not in kinds
            }
            objects[key] = {
                name: value
                for name, value in state[key].items()
                if str(name) in kinds and _dumped(value)
            }
    if isinstance(plain.get(_TYPE), type):
        objects[_TYPE] = plain.pop(_TYPE)
    return {**plain, LEFT_OUT: names, _PICKLED: _dumped(objects)}


def with_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the objects that :func:`separate_objects` took out.

    The objects are unpickled, which executes their content.
    """
    restored = {key: value for key, value in state.items() if key not in (LEFT_OUT, _PICKLED)}
    if not state.get(_PICKLED):
        return restored
    objects = torch.load(io.BytesIO(state[_PICKLED]), map_location="cpu", weights_only=False)
    for key, value in objects.items():
        restored[key] = {**restored[key], **value} if key in restored else value
    return restored


def _is_plain(value: object) -> bool:
    try:
        encode(value, "")
    except CheckpointError:
        return False
    return True


def _dumped(value: object) -> bytes:
    """Return the pickled value, or nothing if it cannot be pickled or is too large.

    Large objects do not belong beside the tensors.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:
        return b""
    return stream.getvalue() if stream.tell() <= _MOST_BYTES else b""


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
