"""The safetensors format, read and written one tensor at a time.

A file is: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the values one after the other
(https://github.com/huggingface/safetensors, "Format"). The library of that name saves tensors that are all in memory; here a tensor is
asked for when it is its turn, and what is read is mapped, not copied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lightning_ptdp.checked_json import integer, list_of, map_of, one_of, record, text
from lightning_ptdp.checkpoint import CheckpointError, TensorEntry, reading
from lightning_ptdp.untrusted import parse_json

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
_TENSORS = map_of(
    record(
        dtype=one_of(_DTYPES, f"one of {sorted(_DTYPES)}"),
        shape=list_of(integer(most=2**56), most=64),
        data_offsets=list_of(integer(), most=2),
    ),
    key=text(),
)


@dataclass(frozen=True)
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
    with reading(file, "is not a whole safetensors file"), open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        places, start = _read_header(stream, size)
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
        begin, end = end, end + entry.num_bytes
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
    if not 0 < length <= min(size - 8, _MAX_HEADER):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    header = stream.read(1)
    if header != b"{":
        raise ValueError("its header is not a JSON object")
    content = parse_json(header + stream.read(length - 1))
    fields = _TENSORS({name: entry for name, entry in content.items() if name != "__metadata__"})
    places, held, before = {}, size - 8 - length, 0
    for name, entry in sorted(fields.items(), key=lambda item: item[1]["data_offsets"]):
        place = _Place(TensorEntry(shape=entry["shape"], dtype=entry["dtype"]), *(*entry["data_offsets"], -1, -1)[:2])
        if place.begin != before or place.end != place.begin + place.entry.num_bytes or place.end > held:
            raise ValueError(
                f"{name!r} has {place.entry.num_bytes} bytes and is said to be in bytes {place.begin} to {place.end} of {held}, where the "
                f"next are from {before} on"
            )
        places[name], before = place, place.end
    if before != held:
        raise ValueError(f"the tensors have {before} bytes, the file has {held} for them")
    return {name: places[name] for name in fields}, 8 + length


def _view(content: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    if content.storage_offset() % entry.dtype.itemsize:
        content = content.clone()  # a header of odd length: the values are not where such numbers can be read
    return content.view(entry.dtype).view(entry.shape)
