"""The ranks' statuses on a board that all can read: one key a rank in the store of the process
group.

The store's host may be the very process that is frozen or gone, and a call to it then never
returns. So no call to the store is made on the thread of the user, nor on one that has to notice
something: one background thread tells what this rank does and hears what the others do, once in a
while and on request. What it heard last is kept, and outlives the store."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from lightning_ptdp.pipeline.status import LiveStatus, RankStatus

__all__ = ["Board", "Bulletin", "Heard"]

_POLL_S = 0.02
_READS_PER_SECOND = (
    50_000  # of single keys, by all ranks together, that the store's host should have to serve
)


@dataclass(frozen=True)
class Heard:
    """The last thing that was heard of a rank.

    Attributes:
        status: What it told.
        at: When that was heard, as ``time.monotonic`` of this process: clocks of other machines do
            not matter.
        lived: Whether it has told anything before its end. What an earlier training left in this
            store has not.
    """

    status: RankStatus
    at: float
    lived: bool


@dataclass(eq=False)
class Board:
    """State and actions of the background thread, which alone writes what it receives.

    Attributes:
        store: A connection of its own (``Store.clone``), not used by anyone else.
        rank: Global rank.
        others: Ranks to listen to.
        world_size: Decides how often that can be, unless it is asked to listen.
        progress: What this rank does.
        interval_s: Time between two publications.
        requests: Set when they have been served.
        heard: By rank; an entry is replaced whenever the rank has told something new.
        answered_at: When the store last answered, as ``time.monotonic``: until then silent ranks
            were silent by themselves.
        asking_since: When the call to the store began that has not returned; None: none is under
            way.
        gone: Whether the store is gone.
    """

    store: Any  # torch's own annotations lack a part of a Store
    rank: int
    others: tuple[int, ...]
    world_size: int
    progress: LiveStatus
    interval_s: float
    requests: queue.SimpleQueue[threading.Event] = field(default_factory=queue.SimpleQueue)
    closing: threading.Event = field(default_factory=threading.Event)
    heard: dict[int, Heard] = field(default_factory=dict)
    answered_at: float = field(default_factory=time.monotonic)
    asking_since: float | None = None
    gone: bool = False
    _pid: int = field(default_factory=os.getpid)

    @property
    def is_mine(self) -> bool:
        """False in a forked child, which has neither the thread nor the connection for itself."""
        return os.getpid() == self._pid

    @property
    def unanswered_s(self) -> float:
        """Return the time in seconds since the store last failed to answer; 0 if it answers."""
        since = self.answered_at if self.gone else self.asking_since
        return 0.0 if since is None else time.monotonic() - since

    def serve(self) -> None:
        """Tell and hear until it is told to end, or the store is gone."""
        request: threading.Event | None = threading.Event()
        listened, listens_every_s = (
            0.0,
            max(self.interval_s, self.world_size * len(self.others) / _READS_PER_SECOND),
        )
        try:
            while not self.closing.is_set():
                self.asking_since = time.monotonic()
                self.store.set(_key(self.rank), self.progress.status().encode())
                if request is not None or time.monotonic() - listened >= listens_every_s:
                    listened = time.monotonic()
                    self._listen()
                self.answered_at, self.asking_since = time.monotonic(), None
                if request is not None:
                    request.set()
                try:
                    request = self.requests.get(timeout=self.interval_s)
                except queue.Empty:
                    request = None
            self.store.set(_key(self.rank), self.progress.status().encode())
        except Exception:
            # Once the store is gone, it will not come back: leave quietly, since every further
            # attempt prints torch's warnings.
            self.gone = True
            if request is not None:
                request.set()

    def _listen(self) -> None:
        store, told = (
            self.store,
            [rank for rank in self.others if rank in self.heard or self.store.check([_key(rank)])],
        )
        keys = [_key(rank) for rank in told]
        texts = (
            store.multi_get(keys)
            if keys and store.has_extended_api()
            else [store.get(key) for key in keys]
        )
        for rank, text in zip(told, texts, strict=True):
            status = RankStatus.decode(text)
            before = self.heard.get(rank)
            if before is None or before.status != status:
                lived = not status.is_done or (before is not None and before.lived)
                self.heard[rank] = Heard(status, time.monotonic(), lived)

    def meet(self, topic: str, limit_s: float, answer: list[bool]) -> None:
        """Put into ``answer`` whether all ranks came to ``topic``; leaves it empty where the store
        cannot tell."""
        with contextlib.suppress(Exception):
            topic = f"lightning_ptdp/world/meeting/{topic}"
            everyone, deadline = (
                [f"{topic}/{other}" for other in range(self.world_size)],
                time.monotonic() + limit_s,
            )
            self.store.set(f"{topic}/{self.rank}", "")
            while not (came := self.store.check(everyone)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # Whoever comes to an end first decides for all: one that gave up just before the last
            # came must not be waited for.
            answer.append(
                self.store.compare_set(f"{topic}/answer", "", str(came)) == str(came).encode()
                and came
            )

    def end(self) -> None:
        """Have the thread publish once more and end."""
        if self.is_mine:
            self.closing.set()
            self.requests.put(threading.Event())


class Bulletin:
    """Publishes what this rank does, and hears the other ranks, until it is closed, garbage, or the
    store is gone.

    Attributes:
        board: What is known.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._thread = threading.Thread(target=board.serve, name="ptdp bulletin", daemon=True)
        self._thread.start()
        # The thread has no reference to this object, and ends with it.
        self._finalizer = weakref.finalize(self, board.end)
        self._finalizer.atexit = False

    def exchange(self, limit_s: float) -> bool:
        """Publish and listen now; whether that was done within ``limit_s``, of which the time
        counts that the store is silent already. That the store is gone is known at once."""
        if not self.board.is_mine or not self._thread.is_alive():
            return False
        done = threading.Event()
        self.board.requests.put(done)
        return done.wait(max(0.0, limit_s - self.board.unanswered_s)) and not self.board.gone

    def hear_all(self, limit_s: float) -> None:
        """Return when all the others have told something, or after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (
            time.monotonic() < deadline
            and self.exchange(limit_s)
            and {*self.board.others} - self.board.heard.keys()
        ):
            time.sleep(_POLL_S)

    def roll_call(self, limit_s: float, silent_after_s: float) -> set[int] | None:
        """The ranks that have neither failed nor ended, and say nothing for ``limit_s``, or had
        said nothing for ``silent_after_s``; None: the store did not answer for as long."""
        began = time.monotonic()
        while True:
            if not self.exchange(silent_after_s):
                return None
            heard = dict(self.board.heard)
            silent = {*self.board.others} - {
                rank for rank, last in heard.items() if last.at >= began or last.status.is_done
            }
            if time.monotonic() - began > limit_s or all(
                rank in heard and began - heard[rank].at > silent_after_s for rank in silent
            ):
                return silent
            time.sleep(_POLL_S)

    def all_come(self, topic: str, limit_s: float) -> bool:
        """Return True if all ranks ask this under the same ``topic``, which is used once, within
        ``limit_s``.

        All that ask get the same answer.
        """
        if not self.board.is_mine:
            return False
        answer: list[bool] = []
        asker = threading.Thread(
            target=self.board.meet, args=(topic, limit_s, answer), name="ptdp meeting", daemon=True
        )
        asker.start()
        asker.join(2 * limit_s)
        return answer == [True]

    def close(self, limit_s: float = 1.0) -> None:
        """Publish once more and end the thread; waits for it, but no longer than ``limit_s``: it
        may hang in a store that is frozen."""
        if self.board.is_mine and self._finalizer.detach() is not None:
            self.board.end()
            self._thread.join(limit_s)


def _key(rank: int) -> str:
    return f"lightning_ptdp/status/{rank}"
