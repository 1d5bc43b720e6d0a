"""The command line, ``ptdp``: one module a verb, imported only when the verb is used."""

from collections.abc import Sequence

from lightning_ptdp.base.signals import hold_requeue_signal
from lightning_ptdp.cli.recipe_files import recipe_folder

__all__ = ["main", "recipe_folder"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ptdp`` with ``argv`` (None: the process's own arguments) and return the exit code."""
    hold_requeue_signal()  # before the imports, which take seconds
    from lightning_ptdp.cli import entry

    return entry.main(argv)
