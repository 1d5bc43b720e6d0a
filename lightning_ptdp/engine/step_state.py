"""Tracking of the changes that a step makes on the module.

The user's step runs once on every stage, and only the last stage's run completes. Changes of the
other runs are undone. Changes of the last stage's run are sent to the other ranks as a list: of a
list that grew, only the new items are sent.

The LightningModule's own attributes and buffers, and its torchmetrics objects, are watched:
numbers, strings, tensors and arrays, in lists, dictionaries and plain objects. In containers with
more than ``_WATCHED`` items, only items added at the end are found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn

_WATCHED = 256
_DEPTH = 3
_ARRAY_ITEMS = 65536
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Tensor,
    np.ndarray,
    np.generic,
    list,
    tuple,
    dict,
    set,
    deque,
)
_LIBRARIES = (
    "builtins",
    "lightning",
    "lightning_fabric",
    "numpy",
    "pytorch_lightning",
    "tokenizers",
    "torch",
    "torchmetrics",
    "transformers",
)
_CONTAINERS = (list, deque, dict)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, tuple))
_NOT_STATE = frozenset(("log", "_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"))
_OF_METRICS = frozenset(("_computed", "_forward_cache", "_update_count"))

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Owner:
    """A module whose attributes are watched.

    Attributes:
        name: Dotted name, "" for the LightningModule.
        ignored: Attributes that are not state of the user's.
    """

    name: str
    module: nn.Module
    ignored: frozenset[str]

    def attributes(self) -> dict[str, object]:
        """Return the watched attributes and buffers.

        Containers on a class, shared by all of its objects, are included, because a step may append
        to them.
        """
        attrs = (_class_containers(type(self.module)) if not self.name else {}) | vars(self.module)
        return {
            name: value for name, value in attrs.items() if name not in self.ignored
        } | self.module._buffers


def _class_containers(kind: type) -> dict[str, object]:
    bodies = [vars(base) for base in reversed(kind.__mro__) if not _is_of_a_library(base)]
    attrs = {
        name: value for body in bodies for name, value in body.items() if not name.startswith("__")
    }
    return {
        name: value for name, value in attrs.items() if isinstance(value, (list, dict, set, deque))
    }


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def find_owners(module: nn.Module) -> list[Owner]:
    """Return the LightningModule itself and all metrics inside it."""
    from torchmetrics import Metric, MetricCollection, SumMetric

    base = next(
        (kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"), nn.Module
    )
    # Attributes of every metric are its configuration, not its state.
    ignored = _attributes_of(SumMetric) - _OF_METRICS - {"sum_value"}
    return [
        Owner("", module, _attributes_of(base) | _NOT_STATE),
        *(
            Owner(name, child, ignored)
            for name, child in module.named_modules()
            # isinstance would ask every subclass of the abstract class Metric for each new type
            if name and not {Metric, MetricCollection}.isdisjoint(type(child).__mro__)
        ),
    ]


def counting_modules(module: nn.Module, owners: Sequence[Owner]) -> list[Owner]:
    """Return the user's modules inside of ``module`` that are none of ``owners``."""
    names = {owner.name for owner in owners}
    return [
        Owner(name, child, _attributes_of(nn.Module))
        for name, child in module.named_modules()
        if name not in names and not _is_of_a_library(type(child))
    ]


@cache
def _attributes_of(kind: type) -> frozenset[str]:
    return frozenset(vars(kind()))


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        path: Name of an owner, name of its attribute, and keys into the attribute.
        how: "set", "extend" (a list or dictionary, by items at its end), "delete", or "alias" (to
            the object at the path ``value``).
        value: The new value, the new items, or a path.
    """

    path: Path
    how: str
    value: Any = None

    @property
    def name(self) -> str:
        """Return the path as written in the user's code."""
        owner, attribute, *keys = self.path
        return ".".join(part for part in ("self", owner, attribute) if part) + "".join(
            f"[{key!r}]" for key in keys
        )


@dataclass(frozen=True)
class _Seen:
    """A value at the time of the snapshot.

    Attributes:
        mark: The version of a tensor; a copy of an array or set; the items of a deque with a
            maximum length; the number of items of another container.
        items: Items of a container, by key; None if there were too many.
    """

    value: Any
    mark: Any = None
    items: Mapping[Any, _Seen] | None = None


class StepState:
    """Snapshot of the watched attributes, for a later comparison."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._seen = [
            (owner, {name: _see(value) for name, value in owner.attributes().items()})
            for owner in owners
        ]

    def changes(self) -> list[Change]:
        """Return the changes since the snapshot."""
        search = _Search()
        for owner, seen in self._seen:
            search.mapping(seen, owner.attributes(), (owner.name,))
        return search.found

    def before(self, path: Path) -> Any:
        """Return the earlier value at a path, or that of the owner's class; None if there was none."""
        name, *keys = path
        items: Any
        owner, items = next(pair for pair in self._seen if pair[0].name == name)
        if keys[0] not in items:
            return getattr(type(owner.module), keys[0], None)
        for key in keys[:-1]:
            items = items[key].items or {}
        return items[keys[-1]].value if keys[-1] in items else None

    def restore(self) -> None:
        """Undo additions, removals and new bindings.

        A tensor that was changed in place stays changed.
        """
        for owner, seen in self._seen:
            now = owner.attributes()
            for name in _added(seen, now):
                delattr(owner.module, name)
            for name, before in seen.items():
                if _rebound(before, now.get(name)):
                    setattr(owner.module, name, before.value)
                _restore(before)


def _see(value: object, depth: int = 0) -> _Seen:
    if type(value) in _ATOMS:
        return _Seen(value)
    if isinstance(value, Tensor):
        return _Seen(value, None if value.is_inference() else value._version)
    if isinstance(value, np.ndarray):
        return _Seen(value, value.copy() if value.size <= _ARRAY_ITEMS else None)
    if isinstance(value, set):
        return _Seen(value, set(value))
    if isinstance(value, deque) and value.maxlen is not None:
        return _Seen(value, tuple(value))
    content: Any = value
    if not isinstance(value, _CONTAINERS):
        if depth or not _is_object(value):
            return _Seen(value)
        content = vars(value)
    if len(content) > _WATCHED or depth > _DEPTH:
        return _Seen(value, len(content))
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    return _Seen(value, len(content), {key: _see(item, depth + 1) for key, item in pairs})


def _is_object(value: object) -> bool:
    """Return True for an object of the user's that holds data, such as a running average."""
    kind = type(value)
    if _is_of_a_library(kind) or getattr(
        getattr(kind, "__dataclass_params__", None), "frozen", False
    ):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))


class _Search:
    """Collects changes; a repeated object is recorded as an alias."""

    def __init__(self) -> None:
        self.found: list[Change] = []
        self._met: dict[int, tuple[Path, bool]] = {}

    def mapping(self, seen: Mapping[Any, _Seen], now: Mapping[Any, object], path: Path) -> None:
        """Compare the earlier content of a module, object or dictionary with its content now."""
        self.found += [Change((*path, key), "delete") for key in seen if key not in now]
        for key, value in now.items():
            self.value(seen.get(key), value, (*path, key))

    def value(self, seen: _Seen | None, now: object, path: Path) -> None:
        """Compare one value with its earlier one; None if it did not exist."""
        rebound = seen is None or now is not seen.value
        if id(now) in self._met:
            first, changed = self._met[id(now)]
            if rebound or changed:
                self.found.append(Change(path, "alias", first))
            return
        count = len(self.found)
        if seen is None or (
            not _is_same_number(seen.value, now) if rebound else self._has_changed(seen, now, path)
        ):
            self.found.append(Change(path, "set", now))
        if isinstance(now, (Tensor, set, *_CONTAINERS)):
            self._met[id(now)] = path, len(self.found) > count

    def _has_changed(self, seen: _Seen, now: object, path: Path) -> bool:
        """Return True if an object that still exists has to be sent as a whole."""
        if isinstance(now, Tensor):
            return seen.mark is None or now._version != seen.mark
        if isinstance(now, np.ndarray):
            return seen.mark is not None and not np.array_equal(now, seen.mark)
        if isinstance(now, set):
            return now != seen.mark
        if isinstance(seen.mark, tuple):
            assert isinstance(now, deque)
            return not _are_same(seen.mark, now)
        return seen.mark is not None and self._container(seen, now, path)

    def _container(self, seen: _Seen, now: Any, path: Path) -> bool:
        """Return True if a container has to be sent as a whole.

        That is the case if it lost items that were not recorded.
        """
        ordered = isinstance(now, (list, deque))
        if not ordered and seen.items is not None:
            self.mapping(seen.items, now if isinstance(now, dict) else vars(now), path)
            return False
        if len(now) < seen.mark:
            return True
        for key, item in (seen.items or {}).items():
            self.value(item, now[key], (*path, key))
        if len(now) > seen.mark:
            new = islice(now if ordered else now.items(), seen.mark, None)
            self.found.append(Change(path, "extend", list(new) if ordered else dict(new)))
        return False


def _are_same(items: Sequence[object], now: Sequence[object]) -> bool:
    return len(items) == len(now) and all(
        item is current for item, current in zip(items, now, strict=True)
    )


def _is_same_number(before: object, now: object) -> bool:
    return (
        type(before) is type(now)
        and isinstance(now, (bool, int, float, complex, str, bytes))
        and before == now
    )


def _added(seen: Mapping[Any, _Seen], now: Mapping[Any, object]) -> list[Any]:
    return [key for key, value in now.items() if key not in seen and isinstance(value, _PLAIN)]


def _rebound(before: _Seen, now: object) -> bool:
    return now is not before.value and isinstance(now, _PLAIN) and isinstance(before.value, _PLAIN)


def _restore(before: _Seen) -> None:
    value = before.value
    items = before.items
    if isinstance(value, np.ndarray) and before.mark is not None:
        value[...] = before.mark
    elif isinstance(value, set):
        value.intersection_update(before.mark)
        value.update(before.mark)
    elif isinstance(before.mark, tuple):
        if not _are_same(before.mark, value):
            value.clear()
            value.extend(before.mark)
    elif isinstance(value, _CONTAINERS) and items is None:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in reversed(keys[before.mark :]):
            del value[key]
    if items is not None:
        _restore_items(value, items)


def _restore_items(value: Any, items: Mapping[Any, _Seen]) -> None:
    if isinstance(value, (list, deque)):
        if len(value) != len(items) or any(
            item is not items[key].value for key, item in enumerate(value)
        ):
            value.clear()
            value.extend(item.value for item in items.values())
    else:
        content = value if isinstance(value, dict) else vars(value)
        for key in _added(items, content):
            del content[key]
        for key, item in items.items():
            if key not in content or _rebound(item, content[key]):
                content[key] = item.value
    for item in items.values():
        _restore(item)


def apply_changes(module: nn.Module, changes: Sequence[Change]) -> None:
    """Apply the changes of another rank's ``StepState.changes`` to ``module``.

    Raises:
        ValueError: An attribute differs from that of the other rank.
    """
    for change in changes:
        try:
            _apply(module, change)
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the step changed {change.name} on the last pipeline stage, but on this stage "
                f"it is a different object ({error}). Make changes that a step depends on in "
                "hooks, which run on all ranks"
            ) from error


def _apply(module: nn.Module, change: Change) -> None:
    last = change.path[-1]
    target = _follow(module, change.path[:-1])
    if change.how == "extend":
        content = _follow(module, change.path)
        content.update(change.value) if isinstance(content, dict) else content.extend(change.value)
    elif change.how == "delete" and isinstance(target, dict):
        target.pop(last, None)
    elif change.how == "delete":
        delattr(target, last)
    else:
        value = _follow(module, change.value) if change.how == "alias" else change.value
        if isinstance(target, _CONTAINERS):
            target[last] = value
        else:
            setattr(target, last, value)


def _follow(module: nn.Module, path: Path) -> Any:
    value: Any = module.get_submodule(path[0])
    for key in path[1:]:
        value = value[key] if isinstance(value, _CONTAINERS) else getattr(value, key)
    return value
