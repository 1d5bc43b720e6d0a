"""Hyperparameters that are objects.

They are left out of the plain state, which has their names, and stored as bytes. They are unpickled
only for a caller that trusts the checkpoint.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.tagged_json import encode

__all__ = ["LEFT_OUT", "left_out", "separate_objects", "with_objects"]

LEFT_OUT, _OBJECTS = "lightning_ptdp_left_out", "lightning_ptdp_objects"
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
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
        key: found for key in _HYPERPARAMETERS if key in state and (found := left_out(state[key]))
    }
    if not names:
        return state
    kept, objects = dict(state), {}
    for key, found in names.items():
        if "" in found:
            del kept[key]
            objects[key] = state[key]
        else:
            kept[key] = {
                name: value for name, value in state[key].items() if str(name) not in found
            }
            objects[key] = {
                name: value
                for name, value in state[key].items()
                if str(name) in found and _dumped(value)
            }
    if isinstance(kept.get(_TYPE), type):
        objects[_TYPE] = kept.pop(_TYPE)
    return {**kept, LEFT_OUT: names, _OBJECTS: _dumped(objects)}


def with_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the objects that :func:`separate_objects` took out.

    The objects are unpickled, which executes their content.
    """
    kept = {key: value for key, value in state.items() if key not in (LEFT_OUT, _OBJECTS)}
    if not state.get(_OBJECTS):
        return kept
    objects = torch.load(io.BytesIO(state[_OBJECTS]), map_location="cpu", weights_only=False)
    for key, value in objects.items():
        kept[key] = {**kept[key], **value} if key in kept else value
    return kept


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
