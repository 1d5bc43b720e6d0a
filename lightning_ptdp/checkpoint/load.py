"""Loading of a checkpoint's tensors into any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from lightning_ptdp.base.errors import listed
from lightning_ptdp.checkpoint.local_rectangles import Tensors, rectangles_of
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.reader import TensorReader
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, gather, same_outcome

_SHOWN = 5


class Stored(Protocol):
    """Tensors on disk; any rectangle of them can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return the entries of the stored tensors by name."""

    def fill(self, tensors: Tensors) -> None:
        """Read checked tensors in this process alone, converted to the dtype of their targets."""


class InMemory:
    """Whole tensors in memory by their global names, from which a rank copies its rectangles.

    Attributes:
        tensors: Shapes and dtypes of the tensors.
    """

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values
        self.tensors = {
            name: TensorEntry(shape=tuple(value.shape), dtype=value.dtype)
            for name, value in values.items()
        }

    def fill(self, tensors: Tensors) -> None:
        """Fill checked tensors, converted to the dtype of each."""
        for target in rectangles_of(tensors):
            target.values.copy_(self._values[target.name][target.place.slices])


def load_tensors(
    path: str | os.PathLike[str],
    tensors: Tensors,
    *,
    strict: bool = True,
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    open_stored: Callable[[str | os.PathLike[str]], Stored] = TensorReader,
) -> list[str]:
    """Fill local tensors in place from a checkpoint of any layout.

    The function is collective over the default process group, if there is one. Every rank reads
    only the stored rectangles that overlap its own. Values are converted to the target's dtype.
    Local elements that no rectangle of the placement covers (padding) keep their values.

    Args:
        path: The checkpoint folder.
        tensors: This rank's local tensors with their placements, under global names. They may
            differ between ranks, or be empty.
        strict: True if a name that the checkpoint lacks is an error; otherwise that tensor is
            unchanged.
        prefix: With ``strict``, a tensor of the checkpoint whose name begins with this prefix and
            that *no* rank requests is an error too (a checkpoint of 12 layers does not load into a
            model of 6).
        rename: Names of ``tensors`` -> their names in the checkpoint: ``{"model/model.":
            "model/net."}``. A key that ends with a dot or a slash applies to all names that begin
            with it. The longest matching key is used.
        open_stored: Function from ``path`` to the stored tensors; by default it opens a checkpoint
            folder.

    Returns:
        The names of ``tensors`` that the checkpoint lacks; empty if ``strict``.

    Raises:
        CheckpointError: The checkpoint is damaged, names are missing or unexpected, full shapes
            differ, a floating-point tensor meets an integer one, or the stored rectangles do not
            cover a tensor. If one rank fails, all ranks raise it.
    """
    doing = f"loading the checkpoint {path}"
    stored_names = {name: renamed(name, rename or {}) for name in tensors}
    with same_outcome(doing):
        _check_distinct(stored_names)
        tensors = {stored_names[name]: value for name, value in tensors.items()}
        stored = open_stored(path)
        missing = _check(stored.tensors, tensors, strict=strict)
    if strict and prefix is not None:
        requested = set().union(*gather({name for name in tensors if name.startswith(prefix)}))
        if unexpected := {name for name in stored.tensors if name.startswith(prefix)} - requested:
            raise CheckpointError(
                f"{doing} failed: {_shown(unexpected)} in the checkpoint but not in the model"
            )
    with same_outcome(doing):
        stored.fill({name: value for name, value in tensors.items() if name not in missing})
    return sorted(name for name, stored_name in stored_names.items() if stored_name in missing)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Return the name of the tensor ``name`` in the checkpoint; see :func:`load_tensors`."""
    if name in rename:
        return rename[name]
    matches = [key for key in rename if key.endswith((".", "/")) and name.startswith(key)]
    if not matches:
        return name
    longest = max(matches, key=len)
    return rename[longest] + name.removeprefix(longest)


def _check_distinct(stored_names: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, stored_name in stored_names.items():
        if first.setdefault(stored_name, name) != name:
            raise CheckpointError(
                f"rename maps two names to one: {first[stored_name]!r} and {name!r} are both "
                f"{stored_name!r} in the checkpoint"
            )


def _check(entries: Mapping[str, TensorEntry], tensors: Tensors, *, strict: bool) -> set[str]:
    """Check that the tensors fit, and return the names that the checkpoint lacks."""
    missing = {name for name in tensors if name not in entries}
    if missing and strict:
        raise CheckpointError(f"{_shown(missing)} not in the checkpoint")
    errors = []
    for name, (tensor, placement) in tensors.items():
        if name in missing:
            continue
        entry = entries[name]
        if entry.shape != placement.full_shape:
            errors.append(
                f"{name!r} has the shape {entry.shape} in the checkpoint, but "
                f"{placement.full_shape} in the model"
            )
        elif not _convertible(entry, tensor):
            errors.append(
                f"{name!r} is {entry.dtype} in the checkpoint, but {tensor.dtype} in the model"
            )
    if errors:
        raise CheckpointError(listed(errors, _SHOWN, "; "))
    return missing


def _convertible(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Return True if the dtypes can be converted: float to float, or integer to integer.

    A conversion of fractions to integers would be a silent error.
    """
    same_kind = entry.dtype.is_floating_point == tensor.is_floating_point()
    return same_kind and entry.dtype.is_complex == tensor.is_complex()


def _shown(names: set[str]) -> str:
    shown = listed([*map(repr, sorted(names))], _SHOWN)
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
