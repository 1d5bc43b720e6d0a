"""Types that a checkpoint stores as plain values, and the notes that restore them.

Such types are paths, enum members, named tuples, NumPy's arrays and numbers, and others.
``state.pt`` holds plain values, which ``torch.load(..., weights_only=True)`` reads anywhere. It
also holds a note for each value that had another type::

    {"root": Path("runs"), "mode": Mode.FAST}
    {"root": "runs", "mode": "fast"},
    [((0,), "path", ""), ((1,), "enum", "package.modes:Mode", "FAST")]

A note may name a class. It is looked up only among the modules that are already imported. Nothing
is imported or called for it, and only enums, named tuples and subclasses of built-in containers are
accepted.
"""

from __future__ import annotations

import collections
import enum
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError

__all__ = ["KEPT", "TYPES", "Note", "plain_value", "restore_types", "with_types"]

TYPES = "lightning_ptdp_types"
"""Key of the notes of a whole checkpoint, by the keys of its entries."""
_SHOWN = 5

Note = tuple[Any, ...]
"""Position of a value, the kind of its original type, and further data to restore it.

A position has one number for each container on the path: i for the value of entry i, ~i for the key
of entry i of a dictionary.
"""
Place = tuple[int, ...]

KEPT = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.Size,
    torch.dtype,
    torch.device,
    type(None),
)
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)
}
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NUMBERS = "biufc"


def plain_value(value: object, key: str, notes: list[Note], place: Place = ()) -> Any:
    """Return a copy of ``value`` in types that ``weights_only=True`` reads.

    Notes on the original types are added to ``notes``.

    Raises:
        CheckpointError: A value has a type that cannot be noted. The message names its key.
    """
    if type(value) in KEPT or type(value) in _registered():
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    found = (
        _scalar(value)
        if isinstance(value, enum.Enum) or not isinstance(value, _CONTAINERS)
        else None
    )
    if found is not None:
        plain, *note = found
        notes.append((place, *note))
        return plain
    return _container(value, key, notes, place)


def _scalar(value: object) -> tuple[Any, ...] | None:
    """Return the plain value of a value that is not a container, and its note."""
    if isinstance(value, PurePath):
        return str(value), "path", "" if isinstance(value, Path) else type(value).__name__
    if isinstance(value, enum.Enum):
        if type(value).__members__.get(value.name) is not value or not _is_found(type(value)):
            return None
        return (
            value.value if type(value.value) in KEPT else value.name,
            "enum",
            _name(type(value)),
            value.name,
        )
    if isinstance(value, np.generic) and type(value.item()) in KEPT:
        return value.item(), "number", value.dtype.str
    if (
        isinstance(value, np.ndarray)
        and type(value) is np.ndarray
        and value.dtype.kind in _NUMBERS
        and _is_known_to_torch(value.dtype)
    ):
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), "array", ""
    return None


def _is_known_to_torch(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _container(value: object, key: str, notes: list[Note], place: Place) -> Any:
    if type(value) not in (*_CONTAINERS, collections.OrderedDict, collections.Counter):
        notes.append((place, *_container_note(value, key)))
    if isinstance(value, dict):
        pairs = [
            (
                plain_value(k, f"{key} (a key of it)", notes, (*place, ~i)),
                plain_value(v, f"{key}[{k!r}]", notes, (*place, i)),
            )
            for i, (k, v) in enumerate(value.items())
        ]
        return (
            type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
        )(dict(pairs))
    assert isinstance(value, list | tuple | set | frozenset)
    inner: list[Note] = []
    items = [
        plain_value(item, f"{key}[{index}]", inner, (*place, index))
        for index, item in enumerate(value)
    ]
    notes += inner
    if isinstance(value, list | tuple):
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, frozenset) or inner:
        notes.append((place, "frozenset" if isinstance(value, frozenset) else "set", ""))
    return items if inner else set(items)


def _container_note(value: object, key: str) -> tuple[str, str]:
    kind = type(value)
    if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
        factory = value.default_factory
        name = "" if factory is None else getattr(factory, "__name__", "?")
        if factory is None or _FACTORIES.get(name) is factory:
            return "defaultdict", name
    elif (
        isinstance(value, _CONTAINERS) and not getattr(value, "__dict__", None) and _is_found(kind)
    ):
        return "class", _name(kind)
    raise CheckpointError(
        f"{key} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) "
        "would refuse to read back: leave it out "
        "(for a hyperparameter: self.save_hyperparameters(ignore=[...])), store plain values, or "
        "register the class in every process "
        f"with torch.serialization.add_safe_globals([{kind.__qualname__}])"
    )


def _registered() -> list[object]:
    return [
        entry[0] if isinstance(entry, tuple) else entry
        for entry in torch.serialization.get_safe_globals()
    ]


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_found(kind: type) -> bool:
    return _class(_name(kind)) is kind


def _class(name: str) -> type | None:
    """Return the class of a name if it is imported and safe to instantiate from a plain value.

    No code of the class may run on instantiation.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None else None
        if found is not None and not isinstance(found, type):
            return None
    if (
        found is None
        or not issubclass(found, (enum.Enum, *_CONTAINERS))
        or hasattr(found, "__del__")
    ):
        return None
    # Such a class holds more than a dictionary's entries.
    keeps_more = issubclass(found, (collections.OrderedDict, collections.defaultdict))
    return None if keeps_more else found


def restore_types(value: Any, notes: Sequence[Note]) -> tuple[Any, list[Note]]:
    """Return a value with the types that the notes describe.

    Returns:
        The value, and the notes on classes that are not imported, whose values remain plain.

    Raises:
        Misfit: A note has an unknown form, or does not fit its value.
    """
    by_place: dict[Place, list[Note]] = {}
    inside: set[Place] = set()
    for note in notes:
        if not (_is_note(note) and note[1] in _MAKERS):
            raise Misfit(f"has a note on types that is not understood: {str(note)[:80]}")
        by_place.setdefault(tuple(note[0]), []).append(note)
        inside.update(tuple(note[0][:length]) for length in range(len(note[0])))
    missing: list[Note] = []

    def rebuild(value: Any, place: Place) -> Any:
        if place in inside:
            value = _map_entries(value, place, rebuild)
        for note in reversed(by_place.get(place, ())):
            try:
                value = _MAKERS[note[1]](value, *note[2:])
            except _NotImported:
                missing.append(note)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise Misfit(
                    f"has a {note[1]} that cannot be made of what is stored for it: {error}"
                ) from error
        return value

    return rebuild(value, ()), missing


def with_types(checkpoint: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return a checkpoint, or the state of one, with the types that its notes describe.

    Args:
        checkpoint: The checkpoint or its state.
        where: Its path, for messages.

    Raises:
        Misfit: The notes are damaged.
    """
    found = {key: value for key, value in checkpoint.items() if key != TYPES}
    missing: dict[str, list[Note]] = {}
    for key, notes in checkpoint.get(TYPES, {}).items():
        if key in found:
            found[key], unread = restore_types(found[key], notes)
            missing |= {key: unread} if unread else {}
    if not missing:
        return found
    names = sorted({note[2] for notes in missing.values() for note in notes})
    warnings.warn(
        f"{where} holds values of {', '.join(names[:_SHOWN])}, which "
        f"{'is' if len(names) == 1 else 'are'} not imported here: they are "
        "read as plain values. Import what defines them before the checkpoint is loaded",
        stacklevel=3,
    )
    return {**found, TYPES: missing}


def _is_note(note: object) -> bool:
    if not isinstance(note, tuple) or len(note) not in (3, 4) or not isinstance(note[0], tuple):
        return False
    return all(type(step) is int for step in note[0]) and all(
        type(text) is str for text in note[1:]
    )


def _map_entries(value: Any, place: Place, rebuild: Callable[[Any, Place], Any]) -> Any:
    if isinstance(value, dict):
        return type(value)(dict(_pairs(value, place, rebuild)))
    if type(value) not in (list, tuple):
        raise Misfit("has a note on types inside of what is no container")
    return type(value)(rebuild(item, (*place, index)) for index, item in enumerate(value))


def _pairs(
    value: Mapping[Any, Any], place: Place, rebuild: Callable[[Any, Place], Any]
) -> Iterator[tuple[Any, Any]]:
    for index, (key, item) in enumerate(value.items()):
        yield rebuild(key, (*place, ~index)), rebuild(item, (*place, index))


class _NotImported(Exception):
    """A class that a note names is not imported."""


def _looked_up(name: str) -> type:
    kind = _class(name)
    if kind is None:
        raise _NotImported(name)
    return kind


def _enum_member(_: Any, name: str, member: str) -> enum.Enum:
    kind = _looked_up(name)
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{name} is no enum")
    found = kind.__members__.get(member)
    if found is None:
        raise _NotImported(f"{name}.{member}")
    return found


def _path(value: str, kind: str) -> PurePath:
    import pathlib

    made: PurePath = {
        "": Path,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }[kind](value)
    return made


def _number(value: Any, dtype: str) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _NUMBERS + "SU":
        raise TypeError(f"{dtype} is no number or text")
    return kind.type(value)


def _instance(value: Any, name: str) -> Any:
    """Return an instance of a container's subclass, without calling its constructor."""
    kind = _looked_up(name)
    base = next(
        (base for base in _CONTAINERS if issubclass(kind, base) and isinstance(value, base)), None
    )
    if base is None:
        raise TypeError(f"{name} is no {type(value).__name__}")
    if base in (tuple, frozenset):
        if len(value) != len(getattr(kind, "_fields", value)):
            raise TypeError(f"{name} has other fields")
        return base.__new__(kind, value)
    made: Any = base.__new__(kind)
    {dict: dict.update, list: list.extend, set: set.update}[base](made, value)
    return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "path": _path,
    "enum": _enum_member,
    "number": _number,
    "array": lambda value, _: value.cpu().numpy(),
    "defaultdict": lambda value, name: collections.defaultdict(
        _FACTORIES[name] if name else None, value
    ),
    "set": lambda value, _: set(value),
    "frozenset": lambda value, _: frozenset(value),
    "class": _instance,
}
