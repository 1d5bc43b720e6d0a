"""A YAML reader that checks the size of a text before it builds any value.

Aliases let a small file expand to a very large value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ptdp.base.untrusted import read_bytes

__all__ = ["bounded", "load_yaml", "load_yaml_file"]

_MOST_BYTES = 1 << 20
_MOST_VALUES = 20_000
_MOST_DEPTH = 64
_MOST_DIGITS = 400  # more than any float has
_NUMBER = re.compile(r"[-+.:_0-9]+")
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml_file(file: str | Path) -> Any:
    """Return the values of a YAML file of at most 1 MiB.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not YAML, has a duplicate key, or is too large once its aliases are
            expanded; see ``load_yaml``.
    """
    content = read_bytes(file, most_bytes=_MOST_BYTES)
    try:
        return load_yaml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 ({error.reason} at byte {error.start}): save it with this encoding"
        ) from error


def load_yaml(text: str) -> Any:
    """Return the values of a YAML text, which may hold plain types only.

    The text may hold at most 20,000 values, aliases expanded, nested at most 64 deep.

    Raises:
        ValueError: The text breaks one of these limits, is not YAML or has a duplicate key.
    """
    return bounded(text, lambda: yaml.load(text, Loader=_BoundedLoader))


def bounded(text: str, load: Callable[[], Any]) -> Any:
    """Return ``load()`` if the text is small enough, and turn every error into a ValueError.

    Raises:
        ValueError: The text is not YAML, is too large or has a duplicate key.
    """
    try:
        _check_size(text)
        _check_keys(yaml.compose(text, Loader=_Base))
        return load()
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        # Constructors raise these errors for values such as `!!int ""` or `!!bool maybe`.
        raise ValueError(f"a value is not of the type that it says ({error!r})") from error


@dataclass(slots=True)
class _Size:
    """Number of values in a node and its descendants, aliases expanded, and their depth."""

    anchor: str | None
    values: int = 1
    depth: int = 1

    def add(self, entry: _Size) -> None:
        self.values += entry.values
        self.depth = max(self.depth, entry.depth + 1)


def _check_size(text: str) -> None:
    """Check the limits in one pass over the events, without following any alias."""
    known: dict[str, _Size] = {}
    open_: list[_Size] = [_Size(None)]
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(_Size(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            _close(open_.pop(), open_[-1], known)
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _MOST_DIGITS and _NUMBER.fullmatch(event.value):
                raise ValueError(f"a number has {len(event.value)} digits")
            _close(_Size(event.anchor), open_[-1], known)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in known:
                raise ValueError(
                    f"the alias *{event.anchor} stands inside of what it stands for, or for nothing"
                )
            open_[-1].add(known[event.anchor])
        if len(open_) > _MOST_DEPTH + 1 or open_[-1].depth > _MOST_DEPTH + 1:
            raise ValueError(f"it is more than {_MOST_DEPTH} deep")
        if sum(size.values for size in open_) > _MOST_VALUES:
            raise ValueError(f"with its aliases it holds more than {_MOST_VALUES} values")


def _check_keys(root: yaml.Node | None) -> None:
    """Refuse a mapping with a duplicate key. YAML readers would keep only the last value."""
    known: set[int] = set()
    left = [] if root is None else [root]
    while left:
        node = left.pop()
        if id(node) in known or isinstance(node, yaml.ScalarNode):
            continue
        known.add(id(node))  # an alias is the same node as its anchor
        if not isinstance(node, yaml.MappingNode):
            left += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            left += (key, value)
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise ValueError(
                    f"the key {key.value!r} is given twice, in line {lines[name]} and in line "
                    f"{line}: remove one of them"
                )
            lines[name] = line


def _close(size: _Size, parent: _Size, known: dict[str, _Size]) -> None:
    if size.anchor is not None:
        known[size.anchor] = size
    parent.add(size)


class _BoundedLoader(_Base):
    """A loader that reads 1e-4 as a number, as jsonargparse does; PyYAML requires 1.0e-4."""


_BoundedLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
