"""The command line, ``ptdp``: one module a verb, imported only when the verb is used."""

from lightning_ptdp.cli.entry import main
from lightning_ptdp.cli.recipe_files import recipe_folder

__all__ = ["main", "recipe_folder"]
