"""Configurations that inherit: ``base: gpt/124m`` in a YAML file is resolved here, before LightningCLI sees it.

A file says what differs from its base, which may have a base itself::

    base: gpt/124m                     # a recipe, or a file (relative to this one)
    trainer:
      max_steps: 1000                  # mappings are merged key by key
      callbacks: []                    # lists are replaced
      logger:
        class_path: CSVLogger          # another class: nothing of the base's init_args is kept
        init_args: {save_dir: runs}

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ptdp.cli.bounded_yaml import load_yaml_file
from lightning_ptdp.cli.errors import UserError
from lightning_ptdp.cli.recipe_files import find_config, recipe_folder

__all__ = ["BASE_KEY", "KeyPath", "ResolvedConfig", "resolve_config", "resolve_configs"]

BASE_KEY = "base"

KeyPath = tuple[str | int, ...]
"""Place of a value: keys of mappings and indices of lists."""


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A configuration with its bases merged in.

    Attributes:
        values: The merged mapping, without ``base``.
        origins: Which file each value that is no container (or an empty one) comes from: a recipe's name or a path.
        files: The configuration's own file, its base, the base's base and so on.
    """

    values: Mapping[str, Any]
    origins: Mapping[KeyPath, str]
    files: tuple[Path, ...]

    @property
    def text(self) -> str:
        """The merged mapping as YAML."""
        return yaml.safe_dump(dict(self.values), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class _Given:
    """A value that is no filled container, and the file that gives it."""

    value: Any
    origin: str


def resolve_config(file: Path) -> ResolvedConfig:
    """Read ``file`` and its bases, and merge them.

    Raises:
        UserError: A file is not a YAML mapping, a base does not exist, or files are each other's bases.
    """
    files, layers = [file], [_read(file)]
    while BASE_KEY in layers[-1]:
        files.append(_find_base(files, layers[-1].pop(BASE_KEY)))
        layers.append(_read(files[-1]))
    merged: Any = {}
    for path, layer in zip(reversed(files), reversed(layers), strict=True):
        merged = _merge(merged, _marked(layer, _label(path)))
    origins: dict[KeyPath, str] = {}
    return ResolvedConfig(values=_unmarked(merged, (), origins), origins=origins, files=tuple(files))


def resolve_configs(arguments: list[str]) -> list[str]:
    """The command line with every ``--config`` value resolved: a file that exists, or the merged text where it has a base.

    Raises:
        UserError: See ``find_config`` and ``resolve_config``.
    """
    resolved: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        value = None
        if argument in ("--config", "-c"):
            value = next(rest, None)
        elif argument.startswith("--config="):
            value = argument.removeprefix("--config=")
        resolved.append(argument if value is None else f"--config={_path_or_text(find_config(value))}")
    return resolved


def _path_or_text(file: Path) -> str:
    config = resolve_config(file)
    # A file without a base stays a path: other files that it names are then found relative to it.
    return str(file) if len(config.files) == 1 else config.text


def _find_base(files: list[Path], name: Any) -> Path:
    file = files[-1]
    if not isinstance(name, str) or not name:
        raise UserError(f"{file}: {BASE_KEY}: {name!r} must be the name of one recipe or file, for example gpt/124m")
    found = find_config(name, said=f"{file}: {BASE_KEY}: ", beside=file.parent)
    if found.resolve() in [seen.resolve() for seen in files]:
        circle = " -> ".join(_label(path) for path in [*files, found])
        raise UserError(f"{file}: {BASE_KEY}: {name} leads back to a file that is being read: {circle}; take one {BASE_KEY} out")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        values = load_yaml_file(file)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"{file} holds a {type(values).__name__}; a configuration is a mapping, such as trainer: {{max_steps: 20}}"
        )
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise UserError(f"{file}: the key {wrong[0]!r} is no text: put it in quotes, or take it out")
    return values


def _label(file: Path) -> str:
    """A recipe's name, or the path."""
    folder = recipe_folder()
    return file.relative_to(folder).as_posix().removesuffix(".yaml") if file.is_relative_to(folder) else str(file)


def _marked(value: Any, origin: str) -> Any:
    if isinstance(value, dict) and value:
        return {key: _marked(entry, origin) for key, entry in value.items()}
    if isinstance(value, list) and value:
        return [_marked(entry, origin) for entry in value]
    return _Given(value, origin)


def _unmarked(tree: Any, path: KeyPath, origins: dict[KeyPath, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _unmarked(entry, (*path, key), origins) for key, entry in tree.items()}
    if isinstance(tree, list):
        return [_unmarked(entry, (*path, index), origins) for index, entry in enumerate(tree)]
    if path:
        origins[path] = tree.origin
    return tree.value if path else {}


def _merge(base: Any, over: Any) -> Any:
    """``over`` on top of ``base``: mappings of the same class key by key, anything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict) and _is_same_class(base, over):
        return base | {key: _merge(base[key], value) if key in base else value for key, value in over.items()}
    if isinstance(base, dict) and isinstance(over, _Given) and over.value == {}:
        return base
    return over


def _is_same_class(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    names = [
        str(tree["class_path"].value).rpartition(".")[2] for tree in (base, over) if isinstance(tree.get("class_path"), _Given)
    ]
    return len(set(names)) < 2
