"""Python values as JSON that keeps their types; tensors are stored separately.

Text, finite numbers, None, lists, and dictionaries with text as keys are themselves. Any other
value is an object with a single key, its tag::

    {"root": Path("runs"), "betas": (0.9, 0.95), "mode": Mode.FAST, "mask": tensor}
    {"root": {"$path": ["Path", "runs"]}, "betas": {"$tuple": [0.9, 0.95]},
     "mode": {"$enum": ["package.modes:Mode", "FAST", "fast"]}, "mask": {"$tensor": [0]}}

A tag may name a class. It is looked up only among the modules that are already imported. Nothing is
imported or called for it, and only enums, named tuples and subclasses of built-in containers are
accepted.
"""

from __future__ import annotations

import collections
import enum
import io
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_ptdp.base.checked_json import Json, Misfit
from lightning_ptdp.base.untrusted import parse_json
from lightning_ptdp.checkpoint.metadata import DTYPES
from lightning_ptdp.checkpoint.save_agreement import CheckpointError
from lightning_ptdp.checkpoint.tensor_files import load_saved

T = TypeVar("T")
_MOST_VALUES, _MOST_DEPTH = 20_000_000, 100
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_FACTORIES: Mapping[str, Any] = {
    "": None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)},
}
_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    kind.__name__: kind for kind in (pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
_NUMBERS = "biufc"


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A value as text, and the tensors to which the text refers by number.

    Attributes:
        text: JSON.
        tensors: Plain tensors on the CPU.
        is_plain: True if ``torch.load(weights_only=True)`` restores the value from a file.
    """

    text: bytes
    tensors: list[Tensor]
    is_plain: bool


@dataclass(frozen=True)
class UnreadValue:
    """A value of a class that is not imported, which can be encoded again."""

    tag: str
    parts: tuple[Any, ...]


def encode(value: object, key: str) -> Encoded:
    """Return ``value`` as text and tensors, which are copies on the CPU.

    Args:
        value: The value.
        key: Its name, for messages: ``"state['loops']"``.

    Raises:
        CheckpointError: A value has another type, or there are too many. The message names its key.
    """
    encoder = _Encoder()
    content = encoder.value(value, key)
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise CheckpointError(f"{key} cannot be written as JSON: {error}") from error
    return Encoded(text=text, tensors=encoder.tensors, is_plain=encoder.is_plain)


def decode(
    text: bytes,
    tensors: Iterable[Tensor],
    *,
    types: Literal["restore", "keep", "plain"] = "restore",
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[Any, set[str]]:
    """Return the value that :func:`encode` described; no code is executed.

    Args:
        text: The JSON.
        tensors: The tensors by number. Each is used at most once.
        types: "restore" the types; values of classes that are not imported become plain. "keep":
            they become an ``UnreadValue``. "plain": all values become types that
            ``torch.load(weights_only=True)`` can restore from a file.
        place: Function that moves a tensor to its device.

    Returns:
        The value, and the names of the classes that are not imported.

    Raises:
        ValueError: The text is damaged.
    """
    # A tag adds two brackets to a value.
    content = parse_json(text, most_values=_MOST_VALUES, most_depth=2 * _MOST_DEPTH + 2)
    decoder = _Decoder(dict(enumerate(tensors)), types, place)
    return decoder.value(content), decoder.missing


def portable(value: object, key: str = "state") -> Any:
    """Return a copy of ``value`` that ``torch.load(weights_only=True)`` can restore from a file.

    Tensors become plain tensors on the CPU. Objects of classes registered with
    ``torch.serialization.add_safe_globals`` are kept.

    Raises:
        CheckpointError: As for :func:`encode`.
    """
    encoded = encode(value, key)
    return decode(encoded.text, encoded.tensors, types="plain")[0]


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.is_plain, self._count = True, 0
        trusted = torch.serialization.get_safe_globals()
        self._trusted = [entry[0] if isinstance(entry, tuple) else entry for entry in trusted]

    def value(self, value: Any, key: str, depth: int = 0) -> Json:
        self._count += 1
        if depth > _MOST_DEPTH or self._count > _MOST_VALUES:
            raise CheckpointError(
                f"{key:.80} is nested more than {_MOST_DEPTH} levels deep, contains itself, or "
                f"has more than {_MOST_VALUES} values"
            )
        kind, depth = type(value), depth + 1
        if kind in (bool, int, str, type(None)) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return [self.value(item, f"{key}[{i}]", depth) for i, item in enumerate(value)]
        if kind is dict:
            return self._pairs(value, key, depth)
        tag, *parts = self._described(value, key)
        self.is_plain &= tag not in _TYPED and (kind is not bytes or value != b"")
        return {f"${tag}": [self.value(item, key, depth) for item in parts]}

    def _pairs(self, value: dict[Any, Any], key: str, depth: int) -> Json:
        is_object = all(type(name) is str and not name.startswith("$") for name in value)
        depth += not is_object
        items = [self.value(item, f"{key}[{name!r}]", depth) for name, item in value.items()]
        if is_object:
            return dict(zip(value, items, strict=True))
        names = [self.value(name, f"{key} (one of its keys)", depth) for name in value]
        return {"$dict": [list(pair) for pair in zip(names, items, strict=True)]}

    def _described(self, value: Any, key: str) -> tuple[Any, ...]:
        """Return the tag of a value, and parts of which it can be made."""
        kind = type(value)
        if kind in _PARTS:
            return kind.__name__, *_PARTS[kind](value)
        if isinstance(value, UnreadValue):
            return value.tag, *value.parts
        if kind is bytes:
            return "bytes", self._add(torch.from_numpy(np.frombuffer(value, np.uint8).copy()))
        if isinstance(value, Tensor) and value.layout is torch.strided:
            if value.dtype in DTYPES.values():
                copy = value.detach().to("cpu", copy=True).contiguous()
                return "tensor", self._add(copy.as_subclass(Tensor))
        elif kind in self._trusted:
            return "registered", _saved(value, key)
        elif kind is np.ndarray and value.dtype.name in _ARRAYS:
            native = value.astype(value.dtype.newbyteorder("="), order="C")
            return "array", self._add(torch.from_numpy(native))
        elif (tagged := _scalar(value) or _container(value)) is not None:
            return tagged
        raise CheckpointError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, which cannot be restored without "
            "executing code. Leave it out (for a hyperparameter: "
            "self.save_hyperparameters(ignore=[...])), store plain values, or register the class "
            f"in every process with torch.serialization.add_safe_globals([{kind.__qualname__}])"
        )

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _scalar(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    if isinstance(value, pathlib.PurePath):
        return "path", "Path" if isinstance(value, pathlib.Path) else kind.__name__, str(value)
    if isinstance(value, enum.Enum):
        inner = value.value if type(value.value) in _SCALARS else value.name
        is_member = kind.__members__.get(value.name) is value and _is_found(kind)
        return ("enum", _name(kind), value.name, inner) if is_member else None
    if isinstance(value, np.generic) and type(value.item()) in _SCALARS:
        return "number", value.dtype.str, value.item()
    return None


def _container(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    if kind is collections.defaultdict:
        name = getattr(value.default_factory, "__name__", "")
        is_known = _FACTORIES.get(name, kind) is value.default_factory
        return ("defaultdict", name, dict(value)) if is_known else None
    if isinstance(value, _CONTAINERS) and not getattr(value, "__dict__", None) and _is_found(kind):
        base = next(base for base in _CONTAINERS if isinstance(value, base))
        return "class", _name(kind), base(value)
    return None


def _saved(value: object, key: str) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        load_saved(stream.getvalue())
    except Exception as error:
        raise CheckpointError(
            f"{key} cannot be written in a form that can be restored: {error}"
        ) from error
    return stream.getvalue()


@dataclass
class _Decoder:
    """Reader of parsed JSON; see :func:`decode`."""

    tensors: dict[int, Tensor]
    types: str
    place: Callable[[Tensor], Tensor]
    missing: set[str] = field(default_factory=set)

    def value(self, content: Json) -> Any:
        if isinstance(content, list):
            return [self.value(item) for item in content]
        if not isinstance(content, dict):
            return content
        tag = next(iter(content), "")
        if len(content) != 1 or not tag.startswith("$"):
            return {name: self.value(item) for name, item in content.items()}
        try:
            return self._made(tag[1:], [self.value(item) for item in content[tag]])
        except Misfit:
            raise
        except Exception as error:
            raise Misfit(f"has a {tag[1:]:.60} that cannot be created: {error}") from error

    def _made(self, tag: str, parts: list[Any]) -> Any:
        if tag in _OF_TENSORS:
            tensor = self.tensors.pop(*parts)
            if tag == "bytes" and self.types == "plain" and not tensor.numel():
                return bytearray()  # torch stores empty bytes as a call that weights_only refuses
            keeps = tag == "tensor" or (tag == "array" and self.types == "plain")
            return self.place(tensor) if keeps else _OF_TENSORS[tag](tensor)
        if tag in _TYPED and self.types == "plain":
            return parts[-1]
        try:
            return _MAKERS[tag](*parts)
        except _NotImported:
            self.missing.add(parts[0])
            return UnreadValue(tag, tuple(parts)) if self.types == "keep" else parts[-1]


class _NotImported(Exception):
    """A class that a tag names is not imported."""


def _looked_up(name: str) -> type:
    kind = _class(name)
    if kind is None:
        raise _NotImported(name)
    return kind


def _only(kind: type[T], value: Any) -> T:
    """Return ``value`` if it is of this type; other types would open files or allocate memory."""
    if type(value) is not kind:
        raise TypeError(f"it must be {kind.__name__}")
    return value


def _enum_member(name: str, member: str, _: object) -> enum.Enum:
    kind = _looked_up(name)
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{name} is not an enum")
    if member not in kind.__members__:
        raise _NotImported(name)
    return kind.__members__[member]


def _number(dtype: str, value: Any) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _NUMBERS + "SU":
        raise TypeError(f"{dtype} is not a number or text")
    return kind.type(value)


def _instance(name: str, value: Any) -> Any:
    """Return an instance of a container's subclass, without calling its constructor."""
    kind: Any = _looked_up(name)
    base: Any = type(value)
    if base not in _CONTAINERS or not issubclass(kind, base):
        raise TypeError(f"{name} is not a {base.__name__}")
    if base in (tuple, frozenset):
        if len(value) != len(getattr(kind, "_fields", value)):
            raise TypeError(f"{name} has different fields")
        return base.__new__(kind, value)
    instance: Any = base.__new__(kind)
    fill: Any = {dict: dict.update, list: list.extend, set: set.update}[base]
    fill(instance, value)
    return instance


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_found(kind: type) -> bool:
    return _class(_name(kind)) is kind


def _class(name: str) -> type | None:
    """Return the class of a name if it is imported and safe to instantiate from a plain value.

    No code of the class may run on instantiation.
    """
    module, _, path = name.partition(":")
    candidate: Any = sys.modules.get(module)
    for part in path.split("."):
        candidate = vars(candidate).get(part) if candidate is not None else None
        if candidate is not None and not isinstance(candidate, type):
            return None
    if (
        candidate is None
        or not issubclass(candidate, (enum.Enum, *_CONTAINERS))
        or hasattr(candidate, "__del__")
    ):
        return None
    # Such a class holds more than a dictionary's entries.
    keeps_more = issubclass(candidate, (collections.OrderedDict, collections.defaultdict))
    return None if keeps_more else candidate


_TYPED = {"path", "enum", "number", "array", "defaultdict", "frozenset", "class"}
"""Tags that ``weights_only`` does not restore; the last part is a plain value in its place."""
_ARRAYS = {"bool"} | {name for name in DTYPES if hasattr(np, name)}
_PARTS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    float: lambda value: (repr(value),),
    complex: lambda value: (value.real, value.imag),
    torch.dtype: lambda value: (str(value).removeprefix("torch."),),
    torch.device: lambda value: (str(value),),
    torch.Size: tuple,
    tuple: tuple,
    set: tuple,
    frozenset: lambda value: (set(value),),
    collections.OrderedDict: lambda value: (dict(value),),
    collections.Counter: lambda value: (dict(value),),
    bytearray: lambda value: (bytes(value),),
}
"""Parts of a value by its exact type, whose name is the tag."""
_OF_TENSORS: Mapping[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "array": lambda tensor: tensor.numpy(),
    "bytes": lambda tensor: tensor.numpy().tobytes(),
}
_MAKERS: Mapping[str, Callable[..., Any]] = {
    "float": float,
    "complex": complex,
    "Size": lambda *sizes: torch.Size(sizes),
    "dtype": lambda name: DTYPES[name],
    "device": lambda name: torch.device(_only(str, name)),
    "registered": lambda content: load_saved(_only(bytes, content)),
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": frozenset,
    "dict": lambda *pairs: dict(pairs),
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "bytearray": lambda content: bytearray(_only(bytes, content)),
    "path": lambda name, path: _PATHS[name](path),
    "enum": _enum_member,
    "number": _number,
    "defaultdict": lambda name, value: collections.defaultdict(_FACTORIES[name], value),
    "class": _instance,
}
