"""Checkpoints of format 1, whose only index is the one of torch's Distributed Checkpoint, a pickle:
read as data and not executed.

``ptdp ckpt reshard`` writes them again, in today's format.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from lightning_ptdp.base.checked_json import Json, Misfit
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.checksums import BLOCK, SummedFile
from lightning_ptdp.checkpoint.pickles import Made, Name, Pairs, read_pickle

__all__ = ["find_values", "parse_index"]

T = TypeVar("T")
_DCP = "torch.distributed.checkpoint"
_RECORD = struct.Struct(
    "<4s22xHH"
)  # in a zip archive: signature, …, length of the name and of what follows it


def parse_index(file: Path, content: bytes) -> tuple[list[str], dict[str, Json]]:
    """Names of data files, and of every tensor its rectangles as ``index.json`` lists them; they
    begin where their archives do.

    Args:
        file: For messages.
        content: DCP's index.

    Raises:
        CheckpointError: It is damaged, or names something that has no place in an index.
    """
    try:
        index = _state(read_pickle(content), f"{_DCP}.metadata.Metadata")
        shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        tensors: dict[str, Json] = {}
        for name, entry in _field(index, "state_dict_metadata", Pairs):
            tensors[_text(name)] = []
            for chunk in _field(
                _state(entry, f"{_DCP}.metadata.TensorStorageMetadata"), "chunks", list
            ):
                fields = _state(chunk, f"{_DCP}.metadata.ChunkStorageMetadata")
                shapes[name, _size(fields["offsets"])] = _size(fields["sizes"])
        numbers: dict[str, int] = {}
        for key, place in _field(index, "storage_data", Pairs):
            where, fields = (
                _state(key, f"{_DCP}.metadata.MetadataIndex"),
                _state(place, f"{_DCP}.filesystem._StorageInfo"),
            )
            name, offset = _text(where["fqn"]), _size(where["offset"])
            number = numbers.setdefault(_text(fields["relative_path"]), len(numbers))
            tensors[name].append(
                [number, fields["offset"], list(offset), list(shapes.pop((name, offset)))]
            )
    except (Misfit, KeyError) as error:
        what = error if isinstance(error, Misfit) else f"it lacks {error}"
        raise CheckpointError(f"{file} is damaged: {what}") from error
    if shapes:
        raise CheckpointError(
            f"{file} is damaged: it does not say where {min(shapes)[0]!r} is stored"
        )
    return list(numbers), tensors


def find_values(file: SummedFile, start: int) -> int:
    """Return the offset of the values in an archive at ``start`` that ``torch.save`` wrote: after
    the name of its record ``data/0``.

    Raises:
        CheckpointError: There is no such record, or its values are not in this machine's order of
            bytes.
    """
    end = start
    while end < min(file.size, start + 2 * BLOCK):
        end = file.block_end(end)
        head = bytes(file.read(start, end))
        place = head.find(b"PK\x03\x04")
        while 0 <= place <= len(head) - _RECORD.size:
            _, name, extra = _RECORD.unpack_from(head, place)
            begin = place + _RECORD.size + name + extra
            if head[place + _RECORD.size :][:name].endswith(b"/data/0") and begin <= len(head):
                if sys.byteorder.encode() not in head[:place]:
                    raise CheckpointError(
                        f"{file.path}: the values at byte {start} are not {sys.byteorder}-endian"
                    )
                return start + begin
            place = head.find(b"PK\x03\x04", place + 1)
    raise CheckpointError(f"{file.path} is damaged: there is no tensor at byte {start}")


def _state(value: object, kind: str) -> Mapping[str, object]:
    """The fields of an object of the class ``kind``."""
    if (
        not isinstance(value, Made)
        or value.maker != Name(kind)
        or not isinstance(value.state, Pairs)
    ):
        raise Misfit(f"it holds {_called(value)}, which has no place there: expected {kind}")
    return {_text(key): item for key, item in value.state}


def _called(value: object) -> str:
    if isinstance(value, Made):
        return _called(value.maker)
    return value.text if isinstance(value, Name) else f"a {type(value).__name__}"


def _field(fields: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = fields[name]
    if not isinstance(value, kind):
        raise Misfit(f"its {name} is {_called(value)}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise Misfit(f"it holds {_called(value)} where a name belongs")
    return value


def _size(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, Made)
        or value.maker != Name("torch.Size")
        or type(value.arguments) is not tuple
    ):
        raise Misfit(f"it holds {_called(value)} where a size belongs")
    extents = value.arguments[0] if len(value.arguments) == 1 else ()
    if type(extents) is not tuple or any(type(extent) is not int for extent in extents):
        raise Misfit("it holds a size that is not of whole numbers")
    return extents
