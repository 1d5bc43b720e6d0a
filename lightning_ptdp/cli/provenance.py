"""A configuration with every default filled in, and behind every value where it came from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from lightning.pytorch import Trainer

from lightning_ptdp.callbacks import Throughput
from lightning_ptdp.cli.generate import SampleOptions
from lightning_ptdp.cli.inheritance import KeyPath, ResolvedConfig, resolve_config, resolve_configs
from lightning_ptdp.cli.lightning_cli import parsed_values

__all__ = ["show_resolved"]

_OWNERS: Mapping[str, type] = {"trainer": Trainer, "throughput": Throughput, "sample": SampleOptions}
_COLUMN = 72
"""Where comments start, if the line is shorter."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    text: str
    origin: str


def show_resolved(file: Path, overrides: Sequence[str] = ()) -> str:
    """YAML that ``ptdp fit --config`` takes, with the origin of every value as a comment: the recipe or file that gives it,
    ``command line``, or ``default of CLASS``.

    Args:
        file: A configuration.
        overrides: Options of ``ptdp fit`` on top of it.

    Raises:
        UserError: A key or value is wrong.
    """
    values = parsed_values([*resolve_configs([f"--config={file}"]), *overrides])
    origins = _Origins(config=resolve_config(file), overrides=_override_paths(overrides), values=values)
    lines = list(_block(values, (), origins))
    return "".join(f"{line.text:{_COLUMN}}  # {line.origin}\n" if line.origin else f"{line.text}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class _Origins:
    config: ResolvedConfig
    overrides: frozenset[KeyPath]
    values: Mapping[str, Any]

    def of(self, path: KeyPath) -> str:
        """Where the value at ``path`` comes from."""
        short = _short(path)
        if short in self.overrides:
            return "command line"
        # Under a class that the command line names, the parser keeps of the file's arguments what that class takes too.
        replaced = any(short[:depth] in self.overrides for depth in range(1, len(short)))
        origin = self._file(path)
        if replaced and origin is None and path[-1] == "class_path":
            return "command line"  # an entry added to a list
        return self._default(path) if origin is None or (replaced and not self._is_as_given(path)) else origin

    def _file(self, path: KeyPath) -> str | None:
        """The file that gives the value, or the first element of the list."""
        origins = self.config.origins
        if path[-1] == "class_path" and path[:-1] in origins:  # logger: CSVLogger, which the parser spells out
            return origins[path[:-1]]
        return next((origin for place, origin in origins.items() if place[: len(path)] == path), None)

    def _is_as_given(self, path: KeyPath) -> bool:
        try:
            return bool(_at(self.config.values, path) == _at(self.values, path))
        except (KeyError, IndexError, TypeError):
            return False

    def _default(self, path: KeyPath) -> str:
        owner = _owner(self.values, path)
        return f"default of {owner.__name__}" if owner is not None else "default of ptdp fit"


def _owner(values: Mapping[str, Any], path: KeyPath) -> type | None:
    """The class whose argument ``path`` is."""
    owner: type | None = None
    for depth in range(1, len(path)):
        here = _at(values, path[:depth])
        if depth == 1 and path[0] in _OWNERS:
            owner = _OWNERS[str(path[0])]
        elif isinstance(here, dict) and "class_path" in here:
            module, _, name = here["class_path"].rpartition(".")
            owner = getattr(import_module(module), name)
        elif path[depth - 1] != "init_args" and owner is not None:
            owner = _dataclass_argument(owner, path[depth - 1]) or owner
    return owner


def _dataclass_argument(owner: type, name: str | int) -> type | None:
    """The dataclass that ``owner`` takes as its argument ``name``, if it does."""
    if not isinstance(name, str) or name not in inspect.signature(owner).parameters:
        return None
    annotated = owner if is_dataclass(owner) else owner.__init__  # type: ignore[misc]
    hint = get_type_hints(annotated).get(name)
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def _override_paths(overrides: Sequence[str]) -> frozenset[KeyPath]:
    """Places that the options name, without ``init_args``; an option may give a whole mapping."""
    found: set[KeyPath] = set()
    rest = iter(overrides)
    for option in rest:
        if not option.startswith("--"):
            continue
        name, given, text = option[2:].partition("=")
        path: KeyPath = tuple(name.removesuffix("+").split("."))
        value = yaml.safe_load(text if given else next(rest, ""))
        found.update(_short((*path, *below)) for below in _leaves(value) if not isinstance(value, list))
        if isinstance(value, (list, str)):
            found.add(path)
    return frozenset(found)


def _leaves(value: Any) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            for below in _leaves(entry):
                yield (key, *below)
    else:
        yield ()


def _short(path: KeyPath) -> KeyPath:
    """As one writes it on the command line: --model.config.num_layers, --trainer.logger=CSVLogger."""
    kept = tuple(key for key in path if key != "init_args")
    return kept[:-1] if kept and kept[-1] == "class_path" else kept


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def _block(value: Any, path: KeyPath, origins: _Origins) -> Iterator[_Line]:
    """The lines of a filled mapping, or of a list that holds mappings."""
    indent = "  " * (len(path) - 1) if path else ""
    inner = "  " * len(path)
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _entry(f"{inner}{_scalar(key)}:", entry, (*path, key), origins)
        return
    for index, entry in enumerate(value):
        lines = list(_block(entry, (*path, index), origins)) if _is_block(entry) else []
        if not lines:
            yield _Line(text=f"{indent}  - {_scalar(entry)}", origin=origins.of((*path, index)))
            continue
        first, *others = lines
        # The dash stands in the two spaces before the first key.
        yield _Line(text=f"{inner}- {first.text[len(inner) + 2 :]}", origin=first.origin)
        yield from others


def _entry(head: str, value: Any, path: KeyPath, origins: _Origins) -> Iterator[_Line]:
    if _is_block(value):
        yield _Line(text=head, origin="")
        yield from _block(value, path, origins)
    else:
        yield _Line(text=f"{head} {_scalar(value)}", origin=origins.of(path))


def _is_block(value: Any) -> bool:
    return (isinstance(value, dict) and bool(value)) or (isinstance(value, list) and any(isinstance(e, dict) for e in value))


def _scalar(value: Any) -> str:
    """YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
