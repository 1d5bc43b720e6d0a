"""Progress of a preparation: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

__all__ = ["Reporter"]


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Output of progress.

    Attributes:
        say: Function that takes a line of text.
        bars: Show bars on standard error, if it is a terminal.
    """

    say: Callable[[str], None]
    bars: bool

    @contextmanager
    def bar(self, verb: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress, and yield a function to call with every number of bytes done.

        The bar is full after ``total`` bytes.
        """
        console = Console(stderr=True)
        if not self.bars or not console.is_terminal:
            yield self._lines(verb, total)
            return
        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(verb, total=total)
            yield lambda done: progress.advance(task, done)

    def _lines(self, verb: str, total: int) -> Callable[[int], None]:
        """Return a function that says a line at every tenth of the total."""
        reached = 0

        def advance(done: int) -> None:
            nonlocal reached
            before, reached = reached, reached + done
            tenth = 10 * reached // max(total, 1)
            if 10 * before // max(total, 1) < tenth < 10:
                self.say(f"{verb}: {10 * tenth} % of {total / 1e6:,.1f} MB")

        return advance
