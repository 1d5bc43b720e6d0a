"""Configuration files: recipes that are found by name, and YAML without duplicate keys.

Recipes are YAML files that are installed with the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
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


def find_config(name: str, *, said: str = "--config ", beside: Path | None = None) -> Path:
    """Return the file of a configuration, given as a path or as the name of a recipe.

    The prefix ``recipes/`` and the suffix ``.yaml`` of a recipe are optional.

    Args:
        name: The user's text.
        said: Text before the name in messages: the option or key that holds the name.
        beside: Folder of relative paths; None means the working directory.

    Raises:
        UserError: The name is neither a file nor a recipe. The message names the nearest recipe.
    """
    path = Path(name) if beside is None else beside / name
    if _is(path, Path.is_file):
        return path
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short in recipe_names(shared=True):
        return recipe_folder() / f"{short}.yaml"
    if _is(path, Path.is_dir):
        raise UserError(f"{said}{name} is a folder. Give a YAML file in it")
    raise UserError(
        f"{said}{one_line(name)} is neither a file nor a "
        f"recipe{nearest(short, recipe_names(shared=True))} (ptdp recipes list shows all)"
    )


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except OSError:  # a text that is too long for a path
        return False


# ---- YAML texts, in which a duplicate key is an error ---------------------------------------------


class _Loader(_Base):
    """A loader that reads 1e-4 as a number, as jsonargparse does; PyYAML requires 1.0e-4."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


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
