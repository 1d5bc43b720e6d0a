"""The ranks' statuses on a board that all can read: one key a rank in the store of the process group.

The store's host may be the very process that is frozen or gone, and a call to it then never returns. So no call to the store is
made on the thread of the user, nor on one that has to notice something: one background thread tells what this rank does and hears
what the others do, once in a while and on request. What it heard last is kept, and outlives the store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ptdp.pipeline.status import LiveStatus, RankStatus

__all__ = ["Bulletin", "Heard"]

_POLL_S = 0.02
_READS_PER_SECOND = 50_000  # of single keys, by all ranks together, that the store's host should have to serve


@dataclass(frozen=True)
class Heard:
    """The last thing that was heard of a rank.

    Attributes:
        status: What it told.
        at: When that was heard, as ``time.monotonic`` of this process: clocks of other machines do not matter.
    """

    status: RankStatus
    at: float


@dataclass
class _Board:
    """What the background thread knows; it alone writes.

    Attributes:
        heard: By rank; an entry is replaced whenever the rank has told something new.
        answered_at: When the store last answered to the end.
        asking_since: When the call to the store began that has not returned; None: none is under way.
        gone: Whether the store is gone.
    """

    heard: dict[int, Heard] = field(default_factory=dict)
    answered_at: float = field(default_factory=time.monotonic)
    asking_since: float | None = None
    gone: bool = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around calls to the store."""
        self.asking_since = time.monotonic()
        yield
        self.answered_at, self.asking_since = time.monotonic(), None


class Bulletin:
    """Publishes ``progress``, and hears the other ranks, until it is closed, garbage, or the store is gone.

    Args:
        store: A connection of its own (``Store.clone``), not used by anyone else.
        rank: Global rank.
        others: Ranks to listen to.
        world_size: Decides how often that can be.
        progress: What this rank does.
        interval_s: Time between two publications.
    """

    def __init__(
        self, store: Any, *, rank: int, others: Sequence[int], world_size: int, progress: LiveStatus, interval_s: float
    ) -> None:
        self._store, self._rank, self._others, self._pid = store, rank, others, os.getpid()
        self._requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._board, listens = _Board(), max(interval_s, world_size * len(others) / _READS_PER_SECOND)
        self._thread = threading.Thread(
            target=_serve,
            args=(store, rank, tuple(others), progress, interval_s, listens, self._requests, self._closing, self._board),
            name="ptdp bulletin",
            daemon=True,
        )
        self._thread.start()
        # The thread has no reference to this object, and ends with it.
        self._finalizer = weakref.finalize(self, _end, self._requests, self._closing, self._pid)
        self._finalizer.atexit = False

    @property
    def heard(self) -> Mapping[int, Heard]:
        """What was heard last, by rank."""
        return dict(self._board.heard)

    @property
    def answered_at(self) -> float:
        """When the store last answered, as ``time.monotonic``: until then silent ranks were silent by themselves."""
        return self._board.answered_at

    @property
    def unanswered_s(self) -> float:
        """How long the store has not answered what it was asked; 0: it answers."""
        if self._board.gone:
            return time.monotonic() - self._board.answered_at
        asking_since = self._board.asking_since
        return 0.0 if asking_since is None else time.monotonic() - asking_since

    def exchange(self, limit_s: float) -> bool:
        """Publish and listen now; whether that was done within ``limit_s``, of which the time counts that the store is silent already.
        That the store is gone is known at once."""
        if not self._mine or not self._thread.is_alive():
            return False
        done = threading.Event()
        self._requests.put(done)
        return done.wait(max(0.0, limit_s - self.unanswered_s)) and not self._board.gone

    def roll_call(self, limit_s: float, silent_after_s: float) -> set[int] | None:
        """The ranks that have neither failed nor ended, and say nothing for ``limit_s``, or had said nothing for ``silent_after_s``; None:
        the store did not answer for as long."""
        began = time.monotonic()
        while True:
            if not self.exchange(silent_after_s):
                return None
            heard = self.heard
            silent = {*self._others} - {rank for rank, last in heard.items() if last.at >= began or last.status.is_done}
            if time.monotonic() - began > limit_s or all(
                rank in heard and began - heard[rank].at > silent_after_s for rank in silent
            ):
                return silent
            time.sleep(_POLL_S)

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
        """Publish once more and end the thread; waits for it, but no longer than ``limit_s``: it may hang in a store that is frozen."""
        if self._mine and self._finalizer.detach() is not None:
            _end(self._requests, self._closing, self._pid)
            self._thread.join(limit_s)

    @property
    def _mine(self) -> bool:
        """False in a forked child, which has neither the thread nor the connection for itself."""
        return os.getpid() == self._pid


def _key(rank: int) -> str:
    return f"lightning_ptdp/status/{rank}"


def _serve(
    store: Any,
    rank: int,
    others: tuple[int, ...],
    progress: LiveStatus,
    interval_s: float,
    listens_every_s: float,
    requests: queue.SimpleQueue[threading.Event],
    closing: threading.Event,
    board: _Board,
) -> None:
    request: threading.Event | None = threading.Event()
    listened = 0.0
    try:
        while not closing.is_set():
            with board.asking():
                store.set(_key(rank), progress.status().encode())
                if request is not None or time.monotonic() - listened >= listens_every_s:
                    listened = time.monotonic()
                    _listen(store, others, board.heard)
            if request is not None:
                request.set()
            try:
                request = requests.get(timeout=interval_s)
            except queue.Empty:
                request = None
        store.set(_key(rank), progress.status().encode())
    except Exception:
        # Once the store is gone, it will not come back: leave quietly, since every further attempt prints torch's warnings.
        board.gone = True
        if request is not None:
            request.set()


def _listen(store: Any, ranks: tuple[int, ...], heard: dict[int, Heard]) -> None:
    told = [rank for rank in ranks if rank in heard or store.check([_key(rank)])]
    keys = [_key(rank) for rank in told]
    texts = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
    for rank, text in zip(told, texts, strict=True):
        status = RankStatus.decode(text)
        if rank not in heard or heard[rank].status != status:
            heard[rank] = Heard(status, time.monotonic())


def _meet(store: Any, topic: str, rank: int, world_size: int, limit_s: float, answer: list[bool]) -> None:
    with contextlib.suppress(Exception):
        topic = f"lightning_ptdp/world/meeting/{topic}"
        everyone, deadline = [f"{topic}/{other}" for other in range(world_size)], time.monotonic() + limit_s
        store.set(f"{topic}/{rank}", "")
        while not (came := store.check(everyone)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # Whoever comes to an end first decides for all: one that gave up just before the last came must not be waited for.
        answer.append(store.compare_set(f"{topic}/answer", "", str(came)) == str(came).encode() and came)


def _end(requests: queue.SimpleQueue[threading.Event], closing: threading.Event, pid: int) -> None:
    if os.getpid() == pid:
        closing.set()
        requests.put(threading.Event())
