"""``state.pt``: everything of a Lightning checkpoint that is not a sharded tensor, readable without trusting it.

``torch.load(..., weights_only=True)`` refuses arbitrary classes, because unpickling them runs code. What it would refuse is
noticed when it is written, not when somebody needs it back.
"""

from __future__ import annotations

import collections
import enum
import io
import os
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from lightning_ptdp.checked_json import Misfit, integer, list_of, map_of, optional, record, text
from lightning_ptdp.checkpoint.errors import CheckpointError, reading
from lightning_ptdp.checkpoint.metadata import STATE_FILE, CheckpointMetadata, read_metadata, read_verified
from lightning_ptdp.checkpoint.saved import check_saved, why_unread

__all__ = ["dump_state", "portable", "read_state", "read_state_file"]

_KEPT = (bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, type(None))


def portable(value: object, key: str = "state") -> Any:
    """A copy of ``value`` in types that ``weights_only=True`` reads; tensors become plain ones on the CPU.

    Paths become strings, NumPy scalars Python numbers, NumPy arrays tensors, enum members of a plain type that type, and
    subclasses of dict, list and tuple (named tuples, attribute dictionaries …) their base. Objects of classes registered with
    ``torch.serialization.add_safe_globals`` are kept.

    Raises:
        CheckpointError: A value has another type; the message names its key.
    """
    if type(value) in _KEPT:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return portable(value.item(), key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if type(value) in _registered():
        return value
    if isinstance(value, enum.Enum) and type(value.value) in _KEPT:
        return value.value
    return _container(value, key)


def _container(value: object, key: str) -> Any:
    if isinstance(value, dict):
        kind = type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
        return kind({portable(k, f"{key} (a key of it)"): portable(v, f"{key}[{k!r}]") for k, v in value.items()})
    for base, made in ((list, list), (tuple, tuple), (set, set), (frozenset, set)):
        if isinstance(value, base):
            return made([portable(item, f"{key}[{index}]") for index, item in enumerate(value)])
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{key} is a {name}, which torch.load(weights_only=True) would refuse to read back: leave it out (for a hyperparameter: "
        f"self.save_hyperparameters(ignore=[...])), store plain values, or register the class in every process with "
        f"torch.serialization.add_safe_globals([{type(value).__qualname__}])"
    )


def _registered() -> list[object]:
    return [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]


def dump_state(state: dict[str, Any]) -> bytes:
    """Bytes of ``state.pt``; they have been read back once.

    Raises:
        CheckpointError: A value cannot be stored; the message names its key.
    """
    content = {key: portable(value, f"state[{key!r}]") for key, value in state.items()}
    for key, value in content.items():
        try:  # an object of a registered class may hold what weights_only refuses
            dumped = _dump(value)
            check_saved(io.BytesIO(dumped))
            _load(dumped)
        except Exception as error:
            raise CheckpointError(f"state[{key!r}] cannot be written so that it can be read back: {error}") from error
    try:
        _STATE(content)
    except Misfit as error:
        raise CheckpointError(f"state: {error}") from error
    return _dump(content)


def read_state(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> dict[str, Any]:
    """The Lightning state of a checkpoint, tensors where ``map_location`` (of ``torch.load``) puts them; needs no process group.

    Raises:
        CheckpointError: ``path`` is not a whole checkpoint, or its state is damaged or refused.
    """
    folder = Path(path)
    content = read_state_file(folder, read_metadata(folder))
    try:
        state = _load(content, map_location)
        _STATE(state)
    except Exception as error:
        raise CheckpointError(f"{folder / STATE_FILE} cannot be read: {why_unread(error)}") from error
    return dict(state)


def read_state_file(folder: Path, metadata: CheckpointMetadata) -> bytes:
    """The checked bytes of ``state.pt``.

    Raises:
        CheckpointError: It is missing or damaged, or would be larger in memory than it is.
    """
    if STATE_FILE in metadata.files:
        with reading(folder / STATE_FILE), open(folder / STATE_FILE, "rb") as stream:
            check_saved(stream)
    return read_verified(folder, metadata, STATE_FILE, most=None)


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
    **{"pytorch-lightning_version": optional(text(r"\d{1,4}(\.\d{1,4})*[\w.+-]{0,40}", "a version"))},
)


def _dump(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _load(content: bytes, map_location: Any = "cpu") -> Any:
    return torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
