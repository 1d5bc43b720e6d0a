"""Calls of functions in other processes, and the progress of a preparation.

``ordered_map`` covers many items and keeps the order of the results. ``apart`` makes one call whose
memory must be returned to the system.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from lightning_ptdp.data.data_error import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Generator[Result, None, None]:
    """Apply a function in ``num_workers`` processes, or in this one if it is 1.

    The results keep the order of the items. Only a few results wait at a time.

    Raises:
        DataError: A process ended without a result.
        Exception: The exception of ``function``, at the position of its item.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    yield from _over_processes(function, items, num_workers)


def apart(function: Callable[[Item], Result], item: Item) -> Result:
    """Return ``function(item)``, computed in a process of its own.

    The end of the process returns its memory to the system, which an allocator seldom does.

    Raises:
        DataError: The process ended without a result.
        Exception: The exception of ``function``.
    """
    (result,) = _over_processes(function, [item], 1)
    return result


def _over_processes(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    executor = _pool(num_workers)
    futures: deque[Future[Result]] = deque()
    try:
        for item in items:
            futures.append(executor.submit(function, item))
            if len(futures) > 2 * num_workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool as error:
        hint = f". Use fewer than num_workers={num_workers}" if num_workers > 1 else ""
        raise DataError(
            f"a process was killed, possibly because memory ran out{hint}. Finished parts are kept"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _pool(num_workers: int) -> ProcessPoolExecutor:
    # Fork if possible, as torch's DataLoader does: a new process would first import torch and run
    # the user's script again.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """Prepare a worker: share the parent's objects, and exit if the parent is killed."""
    # The garbage collector writes to every object that it inspects, and a written page is copied.
    gc.freeze()

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "a worker has a parent"
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# ---- Progress of a preparation: a bar on a terminal, occasional lines elsewhere ------------------


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
