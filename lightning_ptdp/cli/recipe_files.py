"""Recipes: YAML files that come with the package, found by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_ptdp.cli.error_messages import UserError, nearest

__all__ = ["find_config", "is_shared", "recipe_folder", "recipe_names"]


def recipe_folder() -> Path:
    """Folder of the recipes: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither exists; the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no recipes in {package / 'recipes'} or {package.parent / 'recipes'}: install "
        "lightning-ptdp again"
    )


def is_shared(name: str) -> bool:
    """Return True for a recipe that only serves as the base of others (its name ends with
    ``common``)."""
    return name.endswith("common")


def recipe_names(*, shared: bool = False) -> list[str]:
    """Names of all recipes, such as ``gpt/nano``, sorted; with ``shared`` also those that are only
    bases."""
    folder = recipe_folder()
    names = sorted(
        path.relative_to(folder).as_posix().removesuffix(".yaml") for path in folder.rglob("*.yaml")
    )
    return [name for name in names if shared or not is_shared(name)]


def find_config(name: str, *, said: str = "--config ", beside: Path | None = None) -> Path:
    """The file behind a name: a path, or a recipe with or without ``recipes/`` and ``.yaml``.

    Args:
        name: What the user wrote.
        said: In front of the name in messages: where it was written.
        beside: Folder in which relative paths start; None: the working directory.

    Raises:
        UserError: Neither a file nor a recipe; the message names the nearest recipe.
    """
    path = Path(name) if beside is None else beside / name
    if _is(path, Path.is_file):
        return path
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short in recipe_names(shared=True):
        return recipe_folder() / f"{short}.yaml"
    if _is(path, Path.is_dir):
        raise UserError(f"{said}{name} is a folder: name a YAML file in it")
    raise UserError(
        f"{said}{' '.join(name.split())[:200]}: there is no such file, and no such "
        f"recipe{nearest(short, recipe_names(shared=True))} "
        "(ptdp recipes list shows all)"
    )


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except OSError:  # too long for a path: a text that was given for a name
        return False
