"""Functions in other processes: over many items, with the results in their order, or once, for the
memory that it takes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from lightning_ptdp.data.data_error import DataError

__all__ = ["apart", "ordered_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Generator[Result, None, None]:
    """``map``, in ``num_workers`` processes (in this one if it is 1); only a few results wait at a
    time.

    Raises:
        DataError: A process ended without a result.
        Exception: What ``function`` raised, at the place of its item.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    yield from _over_processes(function, items, num_workers)


def apart(function: Callable[[Item], Result], item: Item) -> Result:
    """``function(item)`` in a process of its own: what it takes goes back to the system, which an
    allocator seldom gives anything.

    Raises:
        DataError: The process ended without a result.
        Exception: What ``function`` raised.
    """
    (result,) = _over_processes(function, [item], 1)
    return result


def _over_processes(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    executor = _pool(num_workers)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        fewer = f"; use fewer than num_workers={num_workers}" if num_workers > 1 else ""
        raise DataError(
            f"a process was killed, perhaps for its memory{fewer}. What was finished is kept"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _pool(num_workers: int) -> ProcessPoolExecutor:
    # Forked where that works, as torch's DataLoader does: a fresh process would import torch first,
    # and run the user's script again.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """In a worker: share the parent's objects, and do not outlive a parent that was killed."""
    # The collector writes to every object that it looks at, and a page that is written to is
    # copied.
    gc.freeze()

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "a worker has a parent"
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
