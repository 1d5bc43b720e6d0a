"""Loading of untrusted files of ``torch.save``.

``weights_only=True`` executes no code of a file. It creates tensors of any size that the file
requests, though, and unpacks records of any size. These files are refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.checkpoint.save_agreement import CheckpointError

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
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            sizes[value.data_ptr(), value.shape, value.stride()] = value.nbytes
        elif isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            stack += value
    if (total := sum(sizes.values())) > 2 * size + _SPARE:
        raise Misfit(f"has {size} bytes, but its tensors need {total}")
