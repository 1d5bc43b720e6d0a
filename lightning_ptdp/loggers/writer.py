"""A thread that writes what training hands it, so that training never waits for a store.

Ours and not MLflow's own asynchronous queue: that one lives in a process-wide cache with its threads, which a forked process
inherits dead (its flush then waits forever), writes every call as a transaction of its own, and drops what fails.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BackgroundWriter", "insist"]

Item = TypeVar("Item")
_PAUSE_S = 0.5


def insist(action: Callable[[], object], *, patience_s: float) -> None:
    """Call ``action`` again where it raises, until ``patience_s`` are over: a database may be locked for a moment.

    Raises:
        Exception: That of the last call.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            action()
            return
        except Exception:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
        time.sleep(_PAUSE_S)


class BackgroundWriter(Generic[Item]):
    """Gives items to ``write`` in order, all that are waiting at a time.

    A failed write is warned about once; its items are kept and written with the next ones.

    Args:
        write: Called in the thread with 1 to ``most`` items; may raise.
        most: Items in one call.
    """

    def __init__(self, write: Callable[[Sequence[Item]], None], *, most: int = 1000) -> None:
        self._write = write
        self._most = most
        self._waiting: queue.Queue[Item] = queue.Queue()
        self._kept: list[Item] = []
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="lightning-ptdp-log-writer", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item; returns at once."""
        self._waiting.put(item)

    @property
    def unwritten(self) -> Sequence[Item]:
        """What ``write`` failed for."""
        return tuple(self._kept)

    def flush(self, *, patience_s: float = 0.0) -> None:
        """Wait until all items are written; what failed before is tried again, for ``patience_s``.

        Raises:
            Exception: ``write`` failed again; the items are kept.
        """
        self._waiting.join()
        insist(self._write_kept, patience_s=patience_s)

    def _run(self) -> None:
        while True:
            fresh = [self._waiting.get()]
            while len(fresh) < self._most and not self._waiting.empty():
                fresh.append(self._waiting.get())
            self._try(fresh)
            for _ in fresh:
                self._waiting.task_done()

    def _try(self, fresh: list[Item]) -> None:
        self._kept += fresh
        try:
            self._write_kept()
        except Exception as error:
            if not self._warned:
                warnings.warn(f"logging failed and is tried again later; training goes on: {error}", stacklevel=2)
            self._warned = True

    def _write_kept(self) -> None:
        while self._kept:
            batch = self._kept[: self._most]
            self._write(batch)
            self._kept = self._kept[len(batch) :]
