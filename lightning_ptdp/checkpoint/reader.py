"""Reader of rectangles of a checkpoint's tensors, and loading into any layout.

The stored rectangles and the requested ones may differ. Everything that is read is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lightning_ptdp.base.errors import listed
from lightning_ptdp.checkpoint.checksums import SummedFile, open_summed
from lightning_ptdp.checkpoint.index import Index
from lightning_ptdp.checkpoint.local_rectangles import (
    LocalRectangle,
    Tensors,
    check_cover,
    rectangles_of,
)
from lightning_ptdp.checkpoint.metadata import TensorEntry, read_metadata, read_sums
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, gather, same_outcome
from lightning_ptdp.checkpoint.stored_tensor import Part, StoredTensor, read_stored, runs

MODEL = "model/"
"""Prefix of the names of the model's tensors."""
_SHOWN = 5


class TensorReader:
    """Reader of any rectangle of any tensor of a checkpoint, in one process.

    It holds the checkpoint's index, not its tensors. It reads only the requested rectangles, and
    checks them.

    Args:
        path: The checkpoint folder.

    Raises:
        CheckpointError: The folder is not a checkpoint, or its index is damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self.metadata = read_metadata(path)
        self._folder = self.metadata.folder_in(located(path))
        self._index = Index(self._folder, self.metadata)
        self._sums = functools.cache(functools.partial(read_sums, self._folder, self.metadata))

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return the entries of the stored tensors by name."""
        return self.metadata.tensors

    def read(
        self, name: str, *, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return a tensor by its global name, on the CPU in its stored dtype.

        Without ``offset`` and ``shape``, the full tensor is returned, else the rectangle of
        ``shape`` at ``offset``.

        Raises:
            CheckpointError: The bytes that were read are damaged.
        """
        entry = self.tensors[name]
        values = torch.empty(entry.shape if shape is None else tuple(shape), dtype=entry.dtype)
        place = tuple(offset)[: values.dim()] if offset is not None else (0,) * values.dim()
        self.read_into(
            [LocalRectangle(name=name, full_shape=entry.shape, offset=place, values=values)]
        )
        return values

    def on_disk(self, name: str, dtype: torch.dtype | None = None) -> LocalRectangle:
        """Return a full tensor whose values are read when they are written.

        They are converted to ``dtype``; None: the stored one.
        """
        entry = self.tensors[name]
        dtype = dtype or entry.dtype
        values = torch.empty(entry.shape, dtype=dtype, device="meta")
        return replace(
            LocalRectangle.full(name, values),
            read=lambda offset, shape: self.read(name, offset=offset, shape=shape).to(dtype),
        )

    def model_names(self) -> dict[str, str]:
        """Return the names in the model's ``state_dict`` -> the global names.

        Tied parameters have all their names.
        """
        stored = {name.removeprefix(MODEL): name for name in sorted(self.metadata.names(MODEL))}
        aliases = self.metadata.aliases.items()
        return stored | {alias: stored[name] for alias, name in aliases if name in stored}

    def read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return full tensors by their global names, as :meth:`read` does.

        They are read in the order of storage.

        Raises:
            CheckpointError: The bytes that were read are damaged.
        """
        values = {
            name: torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            for name in names
        }
        self.read_into(LocalRectangle.full(name, value) for name, value in values.items())
        return values

    def fill(self, tensors: Tensors) -> None:
        """Fill checked tensors, converted to the dtype of each.

        Raises:
            CheckpointError: As for :meth:`read_into`.
        """
        self.read_into(rectangles_of(tensors))

    def read_into(self, rectangles: Iterable[LocalRectangle]) -> None:
        """Fill this process's rectangles from the stored ones that overlap them; not collective.

        Raises:
            CheckpointError: Reading failed, the bytes that were read are damaged, or the stored
                rectangles do not cover the requested ones.
        """
        read_stored(self._parts(rectangles), self._opened)

    def _parts(self, rectangles: Iterable[LocalRectangle]) -> Iterator[Part]:
        for target in rectangles:
            overlaps = [
                (stored, common)
                for stored in self._index.rectangles(target.name)
                if (common := stored.place.common(target.place)).numel
            ]
            check_cover(
                target.name,
                target.values.shape,
                (common.seen_from(target.offset) for _, common in overlaps),
                "to load",
            )
            dtype = self.tensors[target.name].dtype
            for stored, common in overlaps:
                tensor = StoredTensor(
                    file=self._folder / stored.file,
                    begin=stored.begin,
                    entry=TensorEntry(shape=stored.place.shape, dtype=dtype),
                )
                offset = common.seen_from(stored.place.begin).begin
                yield tensor, replace(target.within(common), offset=offset)

    def _opened(self, path: Place, parts: Sequence[Part]) -> AbstractContextManager[SummedFile]:
        size = self.metadata.files[path.name].size
        ranges = (
            (stored.begin + start, stored.begin + stop)
            for stored, target in parts
            for start, stop in runs(
                stored.entry.shape,
                target.offset,
                target.values.shape,
                itemsize=stored.entry.dtype.itemsize,
            )
        )
        return open_summed(path, self._sums(path.name), size=size, ranges=ranges)


# ---- Loading into a layout -----------------------------------------------------------------------


class Stored(Protocol):
    """Tensors on disk; any rectangle of them can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return the entries of the stored tensors by name."""

    def fill(self, tensors: Tensors) -> None:
        """Read checked tensors in this process alone, converted to the dtype of their targets."""


class InMemory:
    """Full tensors in memory by their global names, from which a rank copies its rectangles.

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


def load_tensors(
    path: PathLike,
    tensors: Tensors,
    *,
    strict: bool = True,
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    aliases: Collection[str] = (),
    open_stored: Callable[[PathLike], Stored] = TensorReader,
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
        aliases: Further names of tensors, which the checkpoint may also have.
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
        found = {name for name in stored.tensors if name.startswith(prefix)}
        if unexpected := found - requested - {*aliases}:
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


def _convertible(entry: TensorEntry, tensor: Tensor) -> bool:
    """Return True if the dtypes can be converted: float to float, or integer to integer.

    A conversion of fractions to integers would be a silent error.
    """
    same_kind = entry.dtype.is_floating_point == tensor.is_floating_point()
    return same_kind and entry.dtype.is_complex == tensor.is_complex()


def _shown(names: set[str]) -> str:
    shown = listed([*map(repr, sorted(names))], _SHOWN)
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
