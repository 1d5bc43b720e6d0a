"""Progress of a preparation: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

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
            yield _PreparationLines(self.say, verb, total).advance
            return
        columns = (
            TextColumn(verb),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(verb, total=total)
            yield lambda done: progress.advance(task, done)


class _PreparationLines:
    """A line of text at every tenth of the total."""

    def __init__(self, say: Callable[[str], None], verb: str, total: int) -> None:
        self._say, self._verb, self._total = say, verb, total
        self._done = 0

    def advance(self, done: int) -> None:
        before, self._done = self._done, self._done + done
        tenth = 10 * self._done // max(self._total, 1)
        if 10 * before // max(self._total, 1) < tenth < 10:
            self._say(f"{self._verb}: {10 * tenth} % of {self._total / 1e6:,.1f} MB")
