"""The ranks' statuses on a board that all can read: one key a rank in the store of the process group.

The store's host may be the very process that is frozen or gone, and a call to it then never returns. So no call to the store is
made on the thread of the user: one background thread writes, and reading takes a short-lived thread that may be left behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ptdp.pipeline.status import LiveStatus, RankStatus

__all__ = ["Bulletin"]

_POLL_S = 0.02


class Bulletin:
    """Publishes ``progress`` until it is closed, garbage, or the store is gone.

    Args:
        store: A connection of its own (``Store.clone``), not used by anyone else.
        rank: Global rank.
        progress: What this rank does.
        interval_s: Time between two publications.
        each_time: Called on the background thread before each of them.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        progress: LiveStatus,
        interval_s: float,
        each_time: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._rank, self._pid = store, rank, os.getpid()
        self._requests: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        arguments = (store, _key(rank), progress, interval_s, self._requests, each_time)
        self._thread = threading.Thread(target=_write, args=arguments, name="ptdp watchdog", daemon=True)
        self._thread.start()
        # The thread has no reference to this object, and ends with it.
        self._finalizer = weakref.finalize(self, _end, self._requests, self._pid)
        self._finalizer.atexit = False

    def publish(self, limit_s: float) -> bool:
        """Publish now; whether that was done within ``limit_s``."""
        if not self._mine or not self._thread.is_alive():
            return False
        done = threading.Event()
        self._requests.put(done)
        return done.wait(limit_s)

    def read(self, ranks: Sequence[int], limit_s: float) -> tuple[dict[int, RankStatus], bool]:
        """What these ranks have published, as far as the store tells within ``limit_s``, and whether it answered to the end."""
        found: dict[int, RankStatus] = {}
        if not self._mine:
            return found, False
        answered = threading.Event()
        reader = threading.Thread(target=_read, args=(self._store, ranks, found, answered), name="ptdp explanation", daemon=True)
        reader.start()
        reader.join(limit_s)
        return dict(found), answered.is_set()

    def all_come(self, topic: str, world_size: int, limit_s: float) -> bool:
        """Whether all ranks ask this under the same ``topic``, which is used once, within ``limit_s``; all that ask get one answer."""
        if not self._mine:
            return False
        answer: list[bool] = []
        asker = threading.Thread(
            target=_meet, args=(self._store, topic, self._rank, world_size, limit_s, answer), name="ptdp meeting", daemon=True
        )
        asker.start()
        asker.join(2 * limit_s)
        return answer == [True]

    def close(self, limit_s: float = 1.0) -> None:
        """End the thread; waits for it, but no longer than ``limit_s``: it may hang in a store that is frozen."""
        if self._mine and self._finalizer.detach() is not None:
            self._requests.put(None)
            self._thread.join(limit_s)

    @property
    def _mine(self) -> bool:
        """False in a forked child, which has neither the thread nor the connection for itself."""
        return os.getpid() == self._pid


def _key(rank: int) -> str:
    return f"lightning_ptdp/status/{rank}"


def _write(
    store: Any,
    key: str,
    progress: LiveStatus,
    interval_s: float,
    requests: queue.SimpleQueue[threading.Event | None],
    each_time: Callable[[], None] | None,
) -> None:
    # Once the store is gone, it will not come back: leave quietly, since every further attempt prints torch's warnings.
    with contextlib.suppress(Exception):
        store.set(key, progress.status().encode())
        while True:
            try:
                request = requests.get(timeout=interval_s)
            except queue.Empty:
                request = threading.Event()
            if request is None:
                return
            if each_time is not None:
                each_time()
            store.set(key, progress.status().encode())
            request.set()


def _read(store: Any, ranks: Sequence[int], found: dict[int, RankStatus], answered: threading.Event) -> None:
    with contextlib.suppress(Exception):
        for rank in ranks:
            if store.check([_key(rank)]):
                found[rank] = RankStatus.decode(store.get(_key(rank)))
        answered.set()


def _meet(store: Any, topic: str, rank: int, world_size: int, limit_s: float, answer: list[bool]) -> None:
    with contextlib.suppress(Exception):
        topic = f"lightning_ptdp/meeting/{topic}"
        everyone, deadline = [f"{topic}/{other}" for other in range(world_size)], time.monotonic() + limit_s
        store.set(f"{topic}/{rank}", "")
        while not (came := store.check(everyone)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # Whoever comes to an end first decides for all: one that gave up just before the last came must not be waited for.
        answer.append(store.compare_set(f"{topic}/answer", "", str(came)) == str(came).encode() and came)


def _end(requests: queue.SimpleQueue[threading.Event | None], pid: int) -> None:
    if os.getpid() == pid:
        requests.put(None)
