"""``index.json``: file and position of every rectangle of every tensor."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from lightning_ptdp.checkpoint.local_rectangles import check_cover
from lightning_ptdp.checkpoint.metadata import (
    INDEX_FILE,
    CheckpointMetadata,
    TensorEntry,
    read_verified,
)
from lightning_ptdp.checkpoint.remote_path import Place
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, reading
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
        try:
            return self._checked(self._metadata.tensors[name], self._tensors[name])
        except Misfit as error:
            raise CheckpointError(f"{self._file} is damaged: {name!r}: {error}") from error

    def _checked(self, entry: TensorEntry, value: Json) -> tuple[StoredRectangle, ...]:
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
            name = self._files[file]
            if begin + math.prod(shape) * entry.dtype.itemsize > self._metadata.files[name].size:
                raise Misfit(
                    f"would reach beyond the end of {name}, which has "
                    f"{self._metadata.files[name].size} bytes"
                )
            return StoredRectangle(file=name, begin=begin, place=Rectangle.at(offset, shape))

        return list_of(check)(value)


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
