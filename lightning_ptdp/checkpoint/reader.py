"""Reader of rectangles of a checkpoint's tensors, and verification of every byte.

The stored rectangles and the requested ones may differ. Everything that is read is checked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from lightning_ptdp.checkpoint.checksums import SummedFile, open_summed
from lightning_ptdp.checkpoint.index import Index
from lightning_ptdp.checkpoint.local_rectangles import (
    LocalRectangle,
    Tensors,
    check_cover,
    rectangles_of,
)
from lightning_ptdp.checkpoint.metadata import (
    CheckpointMetadata,
    TensorEntry,
    read_metadata,
    read_sums,
    read_verified,
)
from lightning_ptdp.checkpoint.remote_path import Place, each, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, StorageError
from lightning_ptdp.checkpoint.stored_tensor import Part, StoredTensor, read_stored, runs

MODEL = "model/"
"""Prefix of the names of the model's tensors."""


class TensorReader:
    """Reader of any rectangle of any tensor of a checkpoint, in one process.

    It holds the checkpoint's index, not its tensors. It reads only the requested rectangles, and
    checks them.

    Args:
        path: The checkpoint folder.

    Raises:
        CheckpointError: The folder is not a checkpoint, or its index is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
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
    ) -> torch.Tensor:
        """Return a tensor by its global name, on the CPU in its stored dtype.

        Without ``offset`` and ``shape``, the whole tensor is returned, else the rectangle of
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
        """Return a whole tensor whose values are read when they are written.

        They are converted to ``dtype``; None: the stored one.
        """
        entry = self.tensors[name]
        dtype = dtype or entry.dtype
        values = torch.empty(entry.shape, dtype=dtype, device="meta")
        return replace(
            LocalRectangle.whole(name, values),
            read=lambda offset, shape: self.read(name, offset=offset, shape=shape).to(dtype),
        )

    def model_names(self) -> dict[str, str]:
        """Return the names in the model's ``state_dict`` -> the global names.

        Tied parameters have all their names.
        """
        stored = {name.removeprefix(MODEL): name for name in sorted(self.metadata.names(MODEL))}
        aliases = self.metadata.aliases.items()
        return stored | {alias: stored[name] for alias, name in aliases if name in stored}

    def read_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors by their global names, as :meth:`read` does.

        They are read in the order of storage.

        Raises:
            CheckpointError: The bytes that were read are damaged.
        """
        values = {
            name: torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            for name in names
        }
        self.read_into(LocalRectangle.whole(name, value) for name, value in values.items())
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


# ---- Verification of every byte of a checkpoint --------------------------------------------------


def verify_checkpoint(
    path: str | os.PathLike[str], *, part: int = 0, parts: int = 1, fetches: bool = True
) -> CheckpointMetadata:
    """Read a whole checkpoint and compare it with its checksums; not collective.

    Args:
        path: The checkpoint folder.
        part: Number of the share of the tensor files to read here; every rank may read one share.
        parts: Number of shares. The small files are always read.
        fetches: Whether data files in object storage are read too. They are compared with their
            checksums again whenever tensors are read.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointError: Files are missing or damaged. The message names all of them.
    """
    metadata = read_metadata(path)
    folder = metadata.folder_in(located(path))
    data = [name for name, entry in sorted(metadata.files.items()) if entry.sha256 is None]

    def error_of(name: str) -> str:
        try:
            if name not in data:
                read_verified(folder, metadata, name)
                return ""
            sums, size = read_sums(folder, metadata, name), metadata.files[name].size
            with open_summed(folder / name, sums, size=size, ranges=[(0, size)]) as file:
                file.check()
        except StorageError:
            raise
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    own_data = data[part::parts] if fetches or isinstance(folder, Path) else []
    names = [*(metadata.files.keys() - set(data)), *own_data]
    errors = dict.fromkeys(filter(None, each(folder, error_of, names)))
    if errors:
        raise CheckpointError("; ".join(errors))
    Index(folder, metadata).check()
    return metadata
