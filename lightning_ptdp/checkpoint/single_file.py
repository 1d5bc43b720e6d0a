"""Lightning's single file, for layouts in which one rank holds the whole model.

The file is written like Lightning's own, and any layout can read it. Its optimizer states are keyed
by position. The file also stores the names of the parameters, so that a layout that holds only a
part of the parameters finds its own states.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.local_rectangles import Tensors, rectangles_of
from lightning_ptdp.checkpoint.metadata import METADATA_FILE, TensorEntry
from lightning_ptdp.checkpoint.saved_state import warn_unread
from lightning_ptdp.checkpoint.tagged_json import decode, encode

PARAMETER_NAMES = "lightning_ptdp_parameters"
"""Key of the names of each optimizer's parameters, group by group."""
TYPES = "lightning_ptdp_types"
"""Key of the values whose types a plain file does not keep, encoded: key, name -> value."""
_TENSORS = ("state_dict", "optimizer_states")
_UNPICKLABLE = (AttributeError, TypeError, pickle.PicklingError)
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint so that ``path`` always holds the whole old or the whole new one.

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
                _save(checkpoint, part)
            except _UNPICKLABLE as error:
                # Like Lightning, save the weights even if the user's objects cannot be pickled.
                picklable = {
                    key: value for key, value in checkpoint.items() if key not in _HYPERPARAMETERS
                }
                _save(picklable, part)
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


def _save(content: Mapping[str, Any], path: Path) -> None:
    with files.open_synced(path) as stream:
        torch.save(dict(content), stream)


class InMemory:
    """Whole tensors in memory by their global names, from which a rank copies its rectangles.

    Attributes:
        tensors: Shapes and dtypes of the tensors.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self.tensors = {
            name: TensorEntry(shape=tuple(value.shape), dtype=value.dtype)
            for name, value in values.items()
        }

    def fill(self, tensors: Tensors) -> None:
        """Fill checked tensors, converted to the dtype of each."""
        for target in rectangles_of(tensors):
            target.values.copy_(self._values[target.name][target.place.slices])


def optimizer_by_name(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], *, prefix: str, number: str
) -> tuple[InMemory, list[dict[str, Any]]]:
    """Return the tensors of an optimizer's ``state_dict`` by parameter name, and its groups.

    The groups have the names of their parameters too.

    Args:
        state: Result of ``optimizer.state_dict()``.
        names: Names of the parameters of each group, in order.
        prefix: Prefix of the tensors' names.
        number: Suffix of the key of a state that is a Python number.

    Raises:
        CheckpointError: The parameters do not match the names.
    """
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in names]:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {[len(group['params']) for group in saved]} "
            f"parameters, but {[len(group) for group in names]} names"
        )
    by_index = {
        i: name
        for group, params in zip(saved, names, strict=True)
        for i, name in zip(group["params"], params, strict=True)
    }
    values: dict[str, Tensor] = {}
    for index, entries in state["state"].items():
        if not isinstance(entries, Mapping) or index not in by_index:
            raise CheckpointError(
                "the checkpoint's optimizer has states that belong to none of its parameters"
            )
        for key, value in entries.items():
            if isinstance(value, int | float):
                key, value = (
                    key + number,
                    torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None),
                )
            if isinstance(value, Tensor):
                values[f"{prefix}{key}/{by_index[index]}"] = value
    groups = [{**group, "params": list(params)} for group, params in zip(saved, names, strict=True)]
    return InMemory(values), groups
