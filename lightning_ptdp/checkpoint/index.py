"""``index.json``: file and position of every rectangle; and verification of every byte."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.base.checked_json import (
    FILE_NAME,
    Check,
    Json,
    Misfit,
    integer,
    list_of,
    map_of,
    record,
    text,
)
from lightning_ptdp.base.untrusted import parse_json
from lightning_ptdp.checkpoint.checksums import open_summed
from lightning_ptdp.checkpoint.local_rectangles import check_cover
from lightning_ptdp.checkpoint.metadata import (
    INDEX_FILE,
    CheckpointMetadata,
    read_metadata,
    read_sums,
    read_verified,
)
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, each, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, StorageError, reading
from lightning_ptdp.parameters.rectangle import Rectangle

_FORMAT = "lightning-ptdp index"
_SMALLEST = 48  # bytes; a rectangle needs more in a header of safetensors


@dataclass(frozen=True, kw_only=True)
class StoredRectangle:
    """A rectangle of a tensor in a data file.

    Attributes:
        file: The data file that holds it.
        begin: Byte of the file at which its values begin; they are stored row by row without gaps.
        place: Position in the full tensor.
    """

    file: str
    begin: int
    place: Rectangle


class Index:
    """Positions of a checkpoint's tensors in its files.

    The entry of a tensor is checked when it is read.

    Args:
        folder: Folder of the index and of the data files.
        metadata: Metadata of the checkpoint.

    Raises:
        CheckpointError: The index is damaged.
    """

    def __init__(self, folder: Place, metadata: CheckpointMetadata) -> None:
        self.rectangles = functools.cache(self._rectangles)
        self._file, self._metadata = folder / INDEX_FILE, metadata
        stored_bytes = sum(entry.size for entry in metadata.files.values())
        dimensions = max((len(entry.shape) for entry in metadata.tensors.values()), default=0)
        # A rectangle is three lists with offset, extent, file and position, each followed by a
        # comma.
        limit = (
            (8 + 2 * dimensions) * (stored_bytes // _SMALLEST + 1)
            + 2 * len(metadata.tensors)
            + 2 * len(metadata.files)
            + 16
        )
        with reading(self._file):
            content = read_verified(folder, metadata, INDEX_FILE)
            fields = _FIELDS(parse_json(content, most_values=limit))
        if fields["byteorder"] != sys.byteorder:
            raise CheckpointError(
                f"{self._file}: the values are {fields['byteorder']}-endian, which this machine "
                "cannot read"
            )
        self._files: list[str] = fields["files"]
        self._tensors: dict[str, Json] = fields["tensors"]
        if unlisted := sorted(set(self._files) - metadata.files.keys()):
            raise CheckpointError(
                f"{self._file} is damaged: it names {unlisted[0]}, which is missing in "
                "metadata.json"
            )
        if unmatched := sorted(self._tensors.keys() ^ metadata.tensors.keys()):
            raise CheckpointError(
                f"{self._file} is damaged: only one of it and metadata.json has {unmatched[0]!r}"
            )

    def check(self) -> None:
        """Check that the rectangles cover every tensor.

        Raises:
            CheckpointError: A tensor is not covered.
        """
        for name, entry in self._metadata.tensors.items():
            places = (stored.place for stored in self.rectangles(name))
            check_cover(name, entry.shape, places, f"in {self._file.parent}")

    def _rectangles(self, name: str) -> tuple[StoredRectangle, ...]:
        """Return the rectangles of a tensor, each of them inside the tensor and its file.

        Raises:
            CheckpointError: The index is damaged.
        """
        entry = self._metadata.tensors[name]
        sizes: Check[tuple[int, ...]] = list_of(integer())
        fields: tuple[Check[Json], ...] = (
            integer(most=len(self._files) - 1),
            integer(),
            sizes,
            sizes,
        )

        def check(value: Json) -> StoredRectangle:
            if type(value) is not list or len(value) != len(fields):
                raise Misfit("must be [file, begin, offset, shape]")
            file, begin, offset, shape = (
                field(item) for field, item in zip(fields, value, strict=True)
            )
            if not len(offset) == len(shape) == len(entry.shape) or any(
                first + extent > full
                for first, extent, full in zip(offset, shape, entry.shape, strict=True)
            ):
                raise Misfit(
                    f"is {list(shape)} at {list(offset)}, which is outside the tensor of shape "
                    f"{list(entry.shape)}"
                )
            file_name = self._files[file]
            size = self._metadata.files[file_name].size
            if begin + math.prod(shape) * entry.dtype.itemsize > size:
                raise Misfit(f"would reach beyond the end of {file_name}, which has {size} bytes")
            return StoredRectangle(file=file_name, begin=begin, place=Rectangle.at(offset, shape))

        with reading(self._file, f"is damaged: {name!r}"):
            return list_of(check)(self._tensors[name])


def encode_index(tensors: Mapping[str, Sequence[StoredRectangle]]) -> bytes:
    """Return the content of ``index.json``."""
    names = sorted({part.file for parts in tensors.values() for part in parts})
    numbers = {name: position for position, name in enumerate(names)}
    content = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "files": names,
        "tensors": {
            name: [
                [numbers[part.file], part.begin, part.place.begin, part.place.shape]
                for part in parts
            ]
            for name, parts in tensors.items()
        },
    }
    return json.dumps(content, separators=(",", ":")).encode()


_FIELDS = record(
    format=text(_FORMAT, _FORMAT),
    byteorder=text("little|big", "little or big"),
    files=list_of(text(FILE_NAME, "the name of a file in this folder")),
    tensors=map_of(lambda value: value),
)


# ---- Verification of every byte of a checkpoint --------------------------------------------------


def verify_checkpoint(
    path: PathLike, *, part: int = 0, parts: int = 1, fetches: bool = True
) -> CheckpointMetadata:
    """Read all of a checkpoint, and compare it with its checksums; not collective.

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
