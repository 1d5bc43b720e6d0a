"""Recipes: YAML files that come with the package, found by name."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_ptdp.cli.errors import UserError, nearest

__all__ = ["find_config", "recipe_folder", "recipe_names", "resolve_configs", "run"]


def recipe_folder() -> Path:
    """Folder of the recipes: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: Neither exists; the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no recipes in {package / 'recipes'} or {package.parent / 'recipes'}: install lightning-ptdp again")


def recipe_names() -> list[str]:
    """Names of all recipes, such as ``gpt/nano``, sorted."""
    folder = recipe_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_config(name: str) -> Path:
    """The file behind a ``--config`` value: a path, or a recipe with or without ``recipes/`` and ``.yaml``.

    Raises:
        UserError: Neither a file nor a recipe; the message names the nearest recipe.
    """
    if Path(name).is_file():
        return Path(name)
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short in recipe_names():
        return recipe_folder() / f"{short}.yaml"
    raise UserError(
        f"--config {name}: there is no such file, and no such recipe{nearest(short, recipe_names())} "
        f"(recipes: {', '.join(recipe_names())})"
    )


def resolve_configs(arguments: list[str]) -> list[str]:
    """The arguments with every ``--config`` value turned into the path of a file that exists."""
    resolved, expects_value = [], False
    for argument in arguments:
        if expects_value:
            argument, expects_value = str(find_config(argument)), False
        elif argument in ("--config", "-c"):
            expects_value = True
        elif argument.startswith("--config="):
            argument = f"--config={find_config(argument.removeprefix('--config='))}"
        resolved.append(argument)
    return resolved


def run(verb: str, arguments: list[str]) -> int:
    """``ptdp recipes list`` and ``ptdp recipes show NAME [--resolved]``."""
    parser = argparse.ArgumentParser(prog=f"ptdp {verb}", description="The recipes that come with lightning-ptdp.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="names and first lines of all recipes")
    show = commands.add_parser("show", help="print a recipe as it is written")
    show.add_argument("name", help="a recipe's name, such as gpt/nano, or a file")
    show.add_argument("--resolved", action="store_true", help="print every value, defaults included, as ptdp fit would use it")
    options = parser.parse_args(arguments)
    if options.command == "list":
        _list()
    elif options.resolved:
        from lightning_ptdp.cli.lightning_cli import print_config

        print_config(str(find_config(options.name)))
    else:
        print(find_config(options.name).read_text(encoding="utf-8"), end="")
    return 0


def _list() -> None:
    width = max((len(name) for name in recipe_names()), default=0)
    for name in recipe_names():
        first_line = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:{width}}  {first_line.removeprefix('#').strip()}")
