"""Configuration files: YAML without duplicate keys, recipes found by name, and inheritance.

Recipes are YAML files that are installed with the package. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli.command_line import CONFIG, options_on
from lightning_ptdp.cli.failures import UserError

_MOST_DEPTH = 100
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def recipe_folder() -> Path:
    """Return the folder of the recipes: in the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither folder exists, because the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"there are no recipes in {package / 'recipes'} or {package.parent / 'recipes'}. "
        "Install lightning-ptdp again"
    )


def recipe_names(*, shared: bool = False) -> list[str]:
    """Return the sorted names of all recipes, such as ``gpt/nano``.

    Args:
        shared: Include the recipes that only serve as bases, whose names end with ``common``.
    """
    folder = recipe_folder()
    names = sorted(
        path.relative_to(folder).as_posix().removesuffix(".yaml") for path in folder.rglob("*.yaml")
    )
    return [name for name in names if shared or not name.endswith("common")]


def find_config(name: str, *, option: str = "--config ", folder: Path | None = None) -> Path:
    """Return the file of a configuration, given as a path or as the name of a recipe.

    The prefix ``recipes/`` and the suffix ``.yaml`` of a recipe are optional.

    Args:
        name: The user's text.
        option: Option or key that holds the name, for messages.
        folder: Folder of relative paths; None means the working directory.

    Raises:
        UserError: The name is neither a file nor a recipe. The message names the nearest recipe.
    """
    path = Path(name) if folder is None else folder / name
    if os.path.isfile(path):  # unlike Path.is_file, it accepts a text that is too long for a path
        return path
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short in recipe_names(shared=True):
        return recipe_folder() / f"{short}.yaml"
    if os.path.isdir(path):
        raise UserError(f"{option}{name} is a folder. Give a YAML file in it")
    raise UserError(
        f"{option}{one_line(name)} is neither a file nor a "
        f"recipe{nearest(short, recipe_names(shared=True))} (ptdp recipes list shows all)"
    )


# ---- YAML texts, in which a duplicate key is an error ------------------------------------------


class _Loader(_Base):
    """A loader that reads 1e-4 as a number, as jsonargparse does; PyYAML requires 1.0e-4."""


class _Dumper(yaml.SafeDumper):
    """A dumper that puts a text such as 1e4 into quotes, because the loader reads it as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def dump_yaml(values: object, **style: Any) -> str:
    """Return values as YAML that ``load_yaml``, jsonargparse and YAML 1.2 read alike.

    Args:
        values: Mappings, lists and plain values.
        style: Options of PyYAML.
    """
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style))


def load_yaml_file(file: str | Path) -> Any:
    """Return the values of a YAML file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not YAML or has a duplicate key.
    """
    try:
        return load_yaml(Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 ({error.reason} at byte {error.start}). Save it with this encoding"
        ) from error


def load_yaml(text: str) -> Any:
    """Return the values of a YAML text, which may hold plain types only.

    Raises:
        ValueError: The text is not YAML or has a duplicate key.
    """
    return checked(text, lambda text: yaml.load(text, Loader=_Loader))


def checked(text: str, load: Callable[[str], Any]) -> Any:
    """Return ``load(text)``, and turn every error into a ValueError.

    Raises:
        ValueError: The text is not YAML or has a duplicate key.
    """
    try:
        _check_depth(text)
        _check_keys(yaml.compose(text, Loader=_Base))
        return load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    except (LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        # Constructors raise these errors for values such as `!!int ""` or `!!bool maybe`.
        raise ValueError(f"a value does not have its declared type ({error!r})") from error


def _check_depth(text: str) -> None:
    """Refuse deep nesting, with which PyYAML before 6.0.4 ends the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ValueError(f"its values are nested more than {_MOST_DEPTH} levels deep")


def _check_keys(root: yaml.Node | None) -> None:
    """Refuse a mapping with a duplicate key. YAML readers would keep only the last value."""
    pending = [root]
    visited = set()
    while pending:
        node = pending.pop()
        if node in visited or not isinstance(node, yaml.CollectionNode):
            continue
        visited.add(node)  # an alias is the same node as its anchor
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            pending += (key, value)
            line = key.start_mark.line + 1
            name = (key.tag, str(key.value))
            if name in lines and not key.tag.endswith(":merge"):
                raise ValueError(
                    f"the key {key.value!r} is given twice, in line {lines[name]} and in line "
                    f"{line}. Remove one of them"
                )
            lines[name] = line


# ---- Configurations that inherit: ``base: gpt/124m`` in a file ---------------------------------
#
# Bases are resolved here, before LightningCLI reads the configuration. A file contains its
# differences from its base, which may itself have a base::
#
#     base: gpt/124m                     # a recipe, or a file (relative to this one)
#     trainer:
#       max_steps: 1000                  # mappings are merged key by key
#       callbacks: []                    # lists are replaced
#       logger:
#         class_path: CSVLogger          # another class: nothing of the base's init_args is kept
#         init_args: {save_dir: runs}


BASE_KEY = "base"

KeyPath = tuple[str | int, ...]
"""Path of a value: keys of mappings and indices of lists."""
MISSING = object()
"""Result of ``value_at`` if there is no value."""


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
        return dump_yaml(dict(self.values))

    def origin(self, path: KeyPath) -> str | None:
        """Return the recipe's name or the path of the file that sets the value at ``path``.

        The first file in ``layers`` that has the value counts. The result is None if there is no
        value.
        """
        if not has(self.values, path):
            return None
        return next(_label(file) for file, values in self.layers if has(values, path))


def value_at(values: object, path: KeyPath) -> object:
    """Return the value at ``path``, or ``MISSING`` if there is none."""
    for key in path:
        entries = dict(enumerate(values)) if isinstance(values, list) else values
        values = entries.get(key, MISSING) if isinstance(entries, dict) else MISSING
    return values


def has(values: object, path: KeyPath) -> bool:
    """Return True if there is a value at ``path``."""
    return value_at(values, path) is not MISSING


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


def merged_values(names: Iterable[str]) -> Mapping[str, Any]:
    """Return the values of configurations, of which later ones override earlier ones.

    Raises:
        UserError: See ``find_config`` and ``resolve_config``.
    """
    return functools.reduce(_merge, (resolve_config(find_config(name)).values for name in names))


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
    base = find_config(name, option=f"{file}: {BASE_KEY}: ", folder=file.parent)
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
    for path in _without_value("init_args", values):
        name = ".".join(map(str, path))
        raise UserError(f"{file}: {name} has no keys. Remove it, or write init_args: {{}}")
    return values


def _without_value(wanted: str, values: object, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of the keys ``wanted`` without a value, also in lists."""
    items: Iterable[tuple[Any, object]] = ()
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = enumerate(values)
    for key, entry in items:
        if key == wanted and entry is None:
            yield (*above, key)
        yield from _without_value(wanted, entry, (*above, key))


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
