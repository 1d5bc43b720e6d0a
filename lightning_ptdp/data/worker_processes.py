"""Calls of functions in other processes.

``ordered_map`` covers many items and keeps the order of the results. ``apart`` makes one call whose
memory must be returned to the system.
"""

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
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(function, item))
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        fewer = f". Use fewer than num_workers={num_workers}" if num_workers > 1 else ""
        raise DataError(
            f"a process was killed, possibly because memory ran out{fewer}. Finished parts are kept"
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
