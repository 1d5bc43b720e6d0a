"""The safetensors format, read and written one tensor at a time.

A file is: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the values one after the other
(https://github.com/huggingface/safetensors, "Format"). The library of that name saves tensors that are all in memory; here a tensor is
asked for when it is its turn, and what is read is mapped, not copied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lightning_ptdp.checkpoint import CheckpointError, TensorEntry

__all__ = ["open_safetensors", "write_safetensors"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, kw_only=True)
class _Place:
    entry: TensorEntry
    begin: int
    end: int


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, mapped: their values are read from the disk when they are used, and must not be written to.

    Raises:
        CheckpointError: The file is not of this format, is cut off, or its header does not fit it.
    """
    file = Path(path)
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            places, start = _read_header(stream, size)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
    values = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return {name: _view(values[start + place.begin : start + place.end], place.entry) for name, place in places.items()}


def write_safetensors(
    path: Path,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of the tensors ``entries``, asking ``read`` for one after the other.

    Args:
        path: The file; it is synced at the end.
        entries: Shape and dtype of every tensor, by name.
        read: Gives a tensor by its name, with that shape and dtype, on the CPU.
        metadata: Text for the header.

    Raises:
        CheckpointError: A dtype has no code in the format.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in _CODES:
            raise CheckpointError(f"{name!r} is {entry.dtype}, which safetensors does not store; there are {sorted(_DTYPES)}")
        begin, end = end, end + _bytes(entry)
        header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, entry in entries.items():
            tensor = read(name).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), name
            stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _read_header(stream: IO[bytes], size: int) -> tuple[dict[str, _Place], int]:
    length = int.from_bytes(stream.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    content = json.loads(stream.read(length))
    places = {}
    for name, entry in content.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r} has the dtype {entry['dtype']!r}; known are {sorted(_DTYPES)}")
        place = _Place(
            entry=TensorEntry(shape=_shape(entry["shape"]), dtype=_DTYPES[entry["dtype"]]), begin=int(begin), end=int(end)
        )
        if not 0 <= place.begin <= place.end <= size - 8 - length or place.end - place.begin != _bytes(place.entry):
            raise ValueError(f"{name!r} is said to be in bytes {begin} to {end}, but the file holds {size - 8 - length}")
        places[name] = place
    return places, 8 + length


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    if any(not isinstance(extent, int) or extent < 0 for extent in sizes):
        raise ValueError(f"a shape is {sizes!r}")
    return tuple(sizes)


def _view(content: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    if content.storage_offset() % entry.dtype.itemsize:
        content = content.clone()  # a header of odd length: the values are not where such numbers can be read
    return content.view(entry.dtype).view(entry.shape)


def _bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize
