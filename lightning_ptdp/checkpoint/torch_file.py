"""Checks of untrusted files of ``torch.save`` before torch loads them.

``weights_only=True`` executes no code of a file, but allocates as much memory as the file requests.
Examples are a record that unpacks to more than the disk holds, a ``bytearray(10**12)``, a tensor of
10^13 elements that are all one stored element, and lists that hold lists twice, 60 levels deep.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.checkpoint.pickles import Made, Name, Persistent, read_pickle

__all__ = ["check_saved", "why_unread"]

_TENSORS = {
    f"torch._utils._rebuild_{name}": position
    for name, position in {
        "tensor": None,
        "tensor_v2": None,
        "qtensor": None,
        "tensor_v3": 6,
    }.items()
}
"""Functions that create a tensor from a storage, offset, size and stride.

Each has the position of the dtype among its arguments, or None.
"""
_SAFE = frozenset(
    f"torch._utils._rebuild_{name}"
    for name in ("parameter", "parameter_with_state", "sparse_tensor")
)
_GREEDY = re.compile(r"torch\._utils\..*|torch\.((cuda|sparse|storage)\.)*\w*(Tensor|Storage)")
"""Functions of torch that allocate as much memory as a file requests.

``weights_only=True`` allows a file to call them; it refuses unknown names.
"""
_ITEM_SIZES = {
    **dict.fromkeys(
        (
            "storage.Untyped",
            "Untyped",
            "Bool",
            "Byte",
            "Char",
            "QInt8",
            "QUInt8",
            "QUInt2x4",
            "QUInt4x2",
        ),
        1,
    ),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
_MOST_PICKLE, _MOST_VALUES, _MOST_DEPTH, _SPARE = 1 << 26, 20_000_000, 100, 1 << 26


def why_unread(error: BaseException) -> str:
    """Return ``torch.load``'s reason in one sentence, without its advice to execute the file."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = found[1] if found is not None else "more than that"
    return f"it holds {what}, but only tensors and plain values are loaded"


def check_saved(stream: IO[bytes]) -> None:
    """Check that a file's content is no larger than the file, and of kinds that are loaded.

    Raises:
        Misfit: The content is larger or of another kind, or the file is not a whole file of
            ``torch.save``.
    """
    size = stream.seek(0, 2)
    try:
        with zipfile.ZipFile(stream) as archive:
            records = {entry.filename: entry.file_size for entry in archive.infolist()}
            packed = [
                e.filename
                for e in archive.infolist()
                if e.compress_type or e.file_size != e.compress_size or e.flag_bits & 1
            ]
            if packed or len(records) != len(archive.infolist()) or sum(records.values()) > size:
                raise Misfit(
                    f"has packed or overlapping records, {sorted(packed)[:1]}, which torch.save "
                    "does not write"
                )
            (name,) = [
                name for name in records if name.endswith("/data.pkl") and name.count("/") == 1
            ]
            if records[name] > _MOST_PICKLE:
                raise Misfit(
                    f"has a {name} of {records[name]} bytes; no more than {_MOST_PICKLE} are read"
                )
            content = archive.read(name)
    except Misfit:
        raise
    # zipfile raises a RuntimeError for archives that are encrypted or of an unknown version.
    except (zipfile.BadZipFile, ValueError, KeyError, RuntimeError, EOFError, OSError) as error:
        raise Misfit(f"is not a whole file of torch.save: {error}") from error
    content_check = _Check(base=name.removesuffix("data.pkl"), records=records)
    content_check.visit(read_pickle(content), 0)
    if (asked := sum(content_check.tensors.values())) > 2 * size + _SPARE:
        raise Misfit(f"has {size} bytes, but its tensors would have {asked}")


@dataclass
class _Check:
    """Check of a file's content.

    Attributes:
        base: Prefix of the names of records.
        records: Sizes of the records in bytes.
        tensors: Bytes of each distinct tensor.
    """

    base: str
    records: dict[str, int]
    tensors: dict[Any, int] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)

    def visit(self, value: object, depth: int) -> int:
        """Return the number of values if nothing in ``value`` were shared."""
        if not isinstance(value, list | tuple | Made):
            return 1
        if depth > _MOST_DEPTH:
            raise Misfit(f"is nested more than {_MOST_DEPTH} times, or holds itself")
        if id(value) not in self._done:
            if isinstance(value, Made):
                self._made(value)
            inner = (
                (value.arguments, value.items, value.state) if isinstance(value, Made) else value
            )
            self._done[id(value)] = 1 + sum(self.visit(item, depth + 1) for item in inner)
            if self._done[id(value)] > _MOST_VALUES:
                raise Misfit(f"would hold more than {_MOST_VALUES} values")
        return self._done[id(value)]

    def _made(self, value: Made) -> None:
        maker, arguments = (
            value.maker.text if isinstance(value.maker, Name) else "",
            value.arguments,
        )
        maker = maker.replace("__builtin__.", "builtins.", 1)  # name in protocol 2
        if type(arguments) is not tuple:
            raise Misfit(f"calls {maker} without arguments")
        if maker in _TENSORS:
            self._tensor(arguments, _TENSORS[maker])
        elif maker == "torch._tensor._rebuild_from_type_v2":
            self._made(
                Made(
                    arguments[0] if arguments else None,
                    arguments[2] if len(arguments) > 2 else None,
                )
            )
        elif maker == "builtins.bytearray" and any(type(argument) is int for argument in arguments):
            raise Misfit("asks for memory")
        elif maker not in _SAFE and _GREEDY.fullmatch(maker):
            raise Misfit(f"calls {maker}, which has no place in it")

    def _tensor(self, arguments: tuple[Any, ...], position: int | None) -> None:
        storage, offset, shape, stride = (*arguments, None, None, None, None)[:4]
        numel, itemsize, key = self._storage(storage)
        if position is not None:
            kind = arguments[position] if len(arguments) > position else None
            dtype = (
                getattr(torch, kind.text.removeprefix("torch."), None)
                if isinstance(kind, Name)
                else None
            )
            if not isinstance(dtype, torch.dtype):
                raise Misfit("has a tensor without a dtype")
            numel, itemsize = numel * itemsize // dtype.itemsize, dtype.itemsize
        if not (
            _is_sizes([offset])
            and _is_sizes(shape)
            and _is_sizes(stride)
            and len(shape) == len(stride)
        ):
            raise Misfit("has a tensor whose shape is not of whole numbers")
        count = math.prod(shape)
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if (count and last >= numel) or math.prod(max(extent, 1) for extent in shape) > 2**56:
            raise Misfit(
                f"has a tensor of {list(shape)} at {offset}, of which it stores {numel} elements"
            )
        self.tensors[key, offset, shape, stride] = count * itemsize

    def _storage(self, value: object) -> tuple[int, int, str]:
        """Return the number of elements, their size, and the record's name."""
        parts = (
            value.id
            if isinstance(value, Persistent) and type(value.id) is tuple and len(value.id) == 5
            else (None,) * 5
        )
        _, kind, key, _, numel = parts
        itemsize = _item_size(kind.text) if isinstance(kind, Name) else 0
        if not itemsize or type(key) is not str or type(numel) is not int:
            raise Misfit("has a tensor without a storage")
        record = f"{self.base}data/{key}"
        if self.records.get(record) != numel * itemsize:
            raise Misfit(
                f"has a storage of {numel} elements, {numel * itemsize} bytes, in {record} of "
                f"{self.records.get(record, 0)} bytes"
            )
        return numel, itemsize, key


def _is_sizes(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        type(extent) is int and 0 <= extent < 2**62 for extent in value
    )


def _item_size(storage: str) -> int:
    """Return the bytes of an element of a class of storages; 0 if it is no such class."""
    return _ITEM_SIZES.get(storage.removeprefix("torch.").removesuffix("Storage"), 0)
