"""Recipes: YAML files that are installed with the package and found by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli.error_messages import UserError


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
