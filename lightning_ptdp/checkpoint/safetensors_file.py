"""Safetensors files, read by the library of that name, and written one tensor at a time.

A file consists of 8 bytes with the length of the header, the header (JSON: name -> dtype, shape,
byte range), and the values in sequence (https://github.com/huggingface/safetensors, "Format"). The
library can only save tensors that are all in memory; this writer requests one tensor after the
other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lightning_ptdp.base.untrusted import parse_json, regular_size
from lightning_ptdp.checkpoint.files import open_synced
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.save_agreement import CheckpointError
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor, as_bytes

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def list_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, from its header alone.

    Raises:
        CheckpointError: The file has another format, is truncated, or does not match its header; or
            the header names an unknown dtype.
    """
    with _whole(path):
        regular_size(Path(path))
        with safe_open(path, framework="np"):
            pass  # The library compares the header with the file.
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(length))
        header.pop("__metadata__", None)
        if unknown := {fields["dtype"] for fields in header.values()} - _DTYPES.keys():
            raise ValueError(
                f"it has tensors of the unsupported dtypes {sorted(unknown)}. Supported are "
                f"{sorted(_DTYPES)}"
            )
    return {
        name: StoredTensor(
            file=Path(path),
            begin=8 + length + fields["data_offsets"][0],
            entry=TensorEntry(shape=tuple(fields["shape"]), dtype=_DTYPES[fields["dtype"]]),
        )
        for name, fields in header.items()
    }


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, memory-mapped.

    The values are read from the disk when they are used. They must not be written to.

    Raises:
        CheckpointError: The file has another format, is truncated, or does not match its header.
    """
    with _whole(path):
        regular_size(Path(path))
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    except (MemoryError, RuntimeError) as error:
        # Mapping a file that is larger than the address space raises these errors.
        raise CheckpointError(
            f"{path} cannot be mapped into memory: {error}".rstrip(": ")
        ) from error


def is_storable(dtype: torch.dtype) -> bool:
    """Return True if the format has a code for ``dtype``."""
    return dtype in _CODES


def header_of(
    entries: Mapping[str, TensorEntry], *, metadata: Mapping[str, str] | None = None, align: int = 8
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with the tensors ``entries``, and the values' positions.

    The positions are bytes of the file, by tensor name. The first is a multiple of ``align``.

    Raises:
        CheckpointError: The format has no code for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in _CODES:
            raise CheckpointError(
                f"{name!r} is {entry.dtype}, which safetensors cannot store. Supported are "
                f"{sorted(_CODES.values())}"
            )
        begins[name], end = end, end + entry.num_bytes
        header[name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def write_safetensors(
    path: Path,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file of the tensors ``entries``, one after the other.

    Args:
        path: The file. It is synced at the end.
        entries: Shape and dtype of every tensor, by name.
        read: Function from a name to the tensor, with that shape and dtype, on the CPU.
        metadata: Text for the header.

    Raises:
        CheckpointError: The format has no code for a dtype.
    """
    head, _ = header_of(entries, metadata=metadata)
    with open_synced(path) as stream:
        stream.write(head)
        for name, entry in entries.items():
            tensor = read(name).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), name
            stream.write(as_bytes(tensor))
