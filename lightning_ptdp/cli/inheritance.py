"""Configurations that inherit: ``base: gpt/124m`` in a YAML file.

Bases are resolved here, before LightningCLI reads the configuration. A file contains its
differences from its base, which may itself have a base::

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

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ptdp.cli.command_line import CONFIG, options_on
from lightning_ptdp.cli.config_files import find_config, load_yaml_file, recipe_folder
from lightning_ptdp.cli.failures import UserError

BASE_KEY = "base"

KeyPath = tuple[str | int, ...]
"""Path of a value: keys of mappings and indices of lists."""


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A configuration merged with its bases.

    Attributes:
        values: The merged mapping, without ``base``.
        layers: Each file with its own values: the configuration, its base, the base's base and so
            on.
    """

    values: Mapping[str, Any]
    layers: tuple[tuple[Path, Mapping[str, Any]], ...]

    @property
    def text(self) -> str:
        """Return the merged mapping as YAML."""
        return yaml.safe_dump(dict(self.values), sort_keys=False, allow_unicode=True)

    def origin(self, path: KeyPath) -> str | None:
        """Return the recipe's name or the path of the file that sets the value at ``path``.

        The first file in ``layers`` that has the value counts. The result is None if there is no
        value.
        """
        if not has(self.values, path):
            return None
        return next(_label(file) for file, values in self.layers if has(values, path))


def value_at(values: object, path: KeyPath) -> object:
    """Return the value at ``path``.

    Raises:
        LookupError: There is no value at ``path``.
    """
    for key in path:
        entries = dict(enumerate(values)) if isinstance(values, list) else values
        if not isinstance(entries, dict):
            raise LookupError(key)
        values = entries[key]
    return values


def has(values: object, path: KeyPath) -> bool:
    """Return True if there is a value at ``path``."""
    try:
        value_at(values, path)
    except LookupError:
        return False
    return True


def leaves(values: object) -> Iterator[KeyPath]:
    """Yield the paths of all values except mappings that are not empty."""
    if isinstance(values, dict) and values:
        for key, entry in values.items():
            for subpath in leaves(entry):
                yield (key, *subpath)
    else:
        yield ()


def short(path: KeyPath) -> KeyPath:
    """Return a path as written on the command line, without ``init_args`` and ``class_path``.

    Examples are ``--model.config.num_layers`` and ``--trainer.logger=CSVLogger``.
    """
    keys = tuple(key for key in path if key != "init_args")
    return keys[:-1] if keys and keys[-1] == "class_path" else keys


def resolve_config(file: Path) -> ResolvedConfig:
    """Read ``file`` and its bases, and merge them.

    Raises:
        UserError: A file is not a YAML mapping, a base does not exist, or the bases form a cycle.
    """
    files = [file]
    layers = [_read(file)]
    while BASE_KEY in layers[-1]:
        files.append(_find_base(files, layers[-1].pop(BASE_KEY)))
        layers.append(_read(files[-1]))
    values = functools.reduce(_merge, reversed(layers))
    return ResolvedConfig(values=values, layers=tuple(zip(files, layers, strict=True)))


def resolve_configs(arguments: list[str]) -> list[str]:
    """Return the command line with every ``--config`` value resolved.

    A value becomes the path of an existing file. If that file has a base, the value becomes the
    merged text. Configurations come first, because the other options override them.

    Raises:
        UserError: See ``find_config`` and ``resolve_config``.
    """
    resolved: list[str] = []
    for option in sorted(options_on(arguments), key=lambda one: one.name not in CONFIG):
        # A value with line breaks is a text that is already resolved.
        is_config = option.name in CONFIG and option.value is not None and "\n" not in option.value
        resolved += (
            [f"--config={_path_or_text(find_config(option.value or ''))}"]
            if is_config
            else option.words
        )
    return resolved


def _path_or_text(file: Path) -> str:
    config = resolve_config(file)
    # A file without a base stays a path, so that file names in it remain relative to it.
    return str(file) if len(config.layers) == 1 else config.text


def _find_base(files: list[Path], name: object) -> Path:
    file = files[-1]
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{file}: {BASE_KEY}: {name!r} must be the name of one recipe or file, for example "
            "gpt/124m"
        )
    base = find_config(name, said=f"{file}: {BASE_KEY}: ", beside=file.parent)
    if base.resolve() in [seen.resolve() for seen in files]:
        cycle = " -> ".join(_label(path) for path in [*files, base])
        raise UserError(
            f"{file}: {BASE_KEY}: {name} leads back to a file that is being read: {cycle}. "
            f"Remove one {BASE_KEY}"
        )
    return base


def _read(file: Path) -> dict[str, Any]:
    try:
        values = load_yaml_file(file)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if values is None:
        raise UserError(
            f"{file} is empty, but a configuration is a mapping, such as base: gpt/nano"
        )
    if not isinstance(values, dict):
        raise UserError(
            f"{file} has a {type(values).__name__}, but a configuration is a mapping, such as "
            "trainer: {max_steps: 20}"
        )
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise UserError(f"{file}: the key {wrong[0]!r} is not text. Put it in quotes, or remove it")
    return values


def _label(file: Path) -> str:
    """Return the name of a recipe, or the path of any other file."""
    folder = recipe_folder()
    if file.is_relative_to(folder):
        return file.relative_to(folder).as_posix().removesuffix(".yaml")
    return str(file)


def _merge(base: Any, override: Any) -> Any:
    """Return ``base`` overridden by ``override``.

    Mappings are merged key by key unless they name different classes. Any other value is replaced.
    """
    if (
        not isinstance(base, dict)
        or not isinstance(override, dict)
        or (override and not _is_same_class(base, override))
    ):
        return override
    return base | {
        key: _merge(base[key], value) if key in base else value for key, value in override.items()
    }


def _is_same_class(*trees: Mapping[str, object]) -> bool:
    return (
        len({str(tree["class_path"]).rpartition(".")[2] for tree in trees if "class_path" in tree})
        < 2
    )
