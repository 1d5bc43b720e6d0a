"""Files of tensors in the formats of safetensors and of ``torch.save``, which may be untrusted.

A safetensors file consists of 8 bytes with the length of the header, the header (JSON: name ->
dtype, shape, byte range), and the values in sequence (https://github.com/huggingface/safetensors,
"Format"). The library of that name reads it. The library can only save tensors that are all in
memory; the writer here requests one tensor after the other.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.base.untrusted import parse_json, regular_size
from lightning_ptdp.checkpoint.files import open_synced
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.remote_path import PathLike
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


def list_safetensors(path: PathLike) -> dict[str, StoredTensor]:
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


def open_safetensors(path: PathLike) -> dict[str, Tensor]:
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
def _whole(path: PathLike) -> Iterator[None]:
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
    read: Callable[[str], Tensor],
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


# ---- Files of torch.save -------------------------------------------------------------------------
#
# ``weights_only=True`` executes no code of a file. It creates tensors of any size that the file
# requests, though, and unpacks records of any size. These files are refused.


_MOST_PICKLE, _SPARE = 1 << 26, 1 << 26


def load_saved(source: Path | bytes) -> Any:
    """Return the content of a file of ``torch.save``; tensors of a path are memory-mapped.

    Raises:
        CheckpointError: The file is damaged or packed, asks for more memory than its size, or holds
            classes that are not registered with ``torch.serialization.add_safe_globals``.
    """
    try:
        if isinstance(source, bytes):
            size = _check_archive(io.BytesIO(source))
            content = torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
        else:
            with open(source, "rb") as stream:
                size = _check_archive(stream)
            content = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        _check_tensors(content, size)
    except Exception as error:
        name = "it" if isinstance(source, bytes) else source
        raise CheckpointError(f"{name} cannot be read: {_reason(error)}") from error
    return content


def _reason(error: Exception) -> str:
    """Return ``torch.load``'s reason in one sentence, without its advice to execute the file."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error) or type(error).__name__
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    content = match[1] if match is not None else "too much data"
    return f"it has {content}, but only tensors and plain values are loaded"


def _check_archive(stream: IO[bytes]) -> int:
    """Return the size of a file whose records are not packed and fit into it."""
    size = stream.seek(0, 2)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            packed = any(
                record.compress_type or record.file_size != record.compress_size
                for record in records
            )
            if packed or sum(record.file_size for record in records) > size:
                raise Misfit("has packed or overlapping records, which torch.save does not write")
            (pickled,) = [record for record in records if record.filename.endswith("/data.pkl")]
            if pickled.file_size > _MOST_PICKLE:
                raise Misfit(f"has more than {_MOST_PICKLE} bytes in addition to its tensors")
            for code, argument, _ in pickletools.genops(archive.read(pickled)):
                # ``bytearray(10**12)`` is the only call of a plain type that fills memory.
                if code.name == "GLOBAL" and str(argument).endswith("bytearray"):
                    raise Misfit("has a bytearray")
    except Misfit:
        raise
    # zipfile raises a RuntimeError for archives that are encrypted or of an unknown version.
    except (zipfile.BadZipFile, ValueError, RuntimeError, EOFError) as error:
        raise Misfit(f"is not a complete file of torch.save: {error}") from error
    return size


def _check_tensors(content: object, size: int) -> None:
    """Check that the tensors are together at most twice as large as their file.

    A tensor of 10^13 elements may be one stored element.
    """
    stack, seen, sizes = [content], set(), {}
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and value.layout is torch.strided:
            sizes[value.data_ptr(), value.shape, value.stride()] = value.nbytes
        elif isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            stack += value
    if (total := sum(sizes.values())) > 2 * size + _SPARE:
        raise Misfit(f"has {size} bytes, but its tensors need {total}")
