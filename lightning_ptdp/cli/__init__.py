"""The ``ptdp`` command line: one module per verb, imported only when the verb is used."""

from collections.abc import Sequence

from lightning_ptdp.base.signals import hold_requeue_signal
from lightning_ptdp.cli.config_files import recipe_folder

__all__ = ["main", "recipe_folder"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ptdp`` and return its exit code.

    Args:
        argv: Arguments after the program's name; None takes them from ``sys.argv``.
    """
    hold_requeue_signal()  # before the imports below, which take seconds
    from lightning_ptdp.cli import entry

    return entry.main(argv)
