"""Board of all ranks' statuses: one key per rank in the process group's store.

The store's host may be the very process that is frozen or gone, and a call to the store then never
returns. Therefore neither the user's thread nor a thread that must detect a hang calls the store.
One background thread publishes this rank's status and reads the statuses of other ranks, at
intervals and on request. The last statuses are kept and outlive the store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.pipeline.rank_status import Heard, LiveStatus, RankStatus

_POLL_S = 0.02
# Reads of single keys, by all ranks together, that the store's host should have to serve.
_READS_PER_SECOND = 50_000


@dataclass(eq=False)
class StatusBoard:
    """Thread that publishes this rank's status and receives the other ranks'.

    It runs until ``end`` is called or the store is gone. Only it writes received statuses.

    Attributes:
        store: A connection of its own (``Store.clone``), used by no other object.
        rank: Global rank.
        others: Ranks to listen to.
        world_size: Number of ranks; limits how often the thread listens without a request.
        progress: Status of this rank.
        interval_s: Time between two publications.
        heard: Last statuses by rank; an entry is replaced for every new status.
        answered_at: Time of the store's last answer, as ``time.monotonic``. If a rank was silent
            before that time, the store was not the cause.
        asking_since: Start of the store call that has not returned yet; None if there is none.
        gone: Whether the store is gone.
    """

    store: Any  # torch's annotations lack a part of a Store
    rank: int
    others: tuple[int, ...]
    world_size: int
    progress: LiveStatus
    interval_s: float
    heard: dict[int, Heard] = field(default_factory=dict)
    answered_at: float = field(default_factory=time.monotonic)
    asking_since: float | None = None
    gone: bool = False

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._closing = threading.Event()
        # Events to set once the request has been served.
        self._requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ptdp status board", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def _is_mine(self) -> bool:
        """Return False in a forked child, which owns neither the thread nor the connection."""
        return os.getpid() == self._pid

    @property
    def unanswered_s(self) -> float:
        """Return the time in seconds for which the store has not answered; 0 if it answers."""
        since = self.answered_at if self.gone else self.asking_since
        return 0.0 if since is None else time.monotonic() - since

    def exchange(self, limit_s: float) -> bool:
        """Publish and listen now.

        Returns:
            True if both were done within ``limit_s``. Time for which the store has already been
            silent counts. If the store is gone, the result is False at once.
        """
        if not self._is_mine or not self._thread.is_alive():
            return False
        done = threading.Event()
        self._requests.put(done)
        return done.wait(max(0.0, limit_s - self.unanswered_s)) and not self.gone

    def wait_for_all(self, limit_s: float) -> None:
        """Wait until all other ranks have published a status, or for ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (
            time.monotonic() < deadline
            and self.exchange(limit_s)
            and {*self.others} - self.heard.keys()
        ):
            time.sleep(_POLL_S)

    def silent_ranks(self, limit_s: float, silent_after_s: float) -> set[int] | None:
        """Return the ranks that have neither failed nor ended, but are silent.

        A rank is silent if it publishes nothing for ``limit_s``, or had published nothing for
        ``silent_after_s`` before the call. The result is None if the store did not answer for
        ``silent_after_s``.
        """
        start = time.monotonic()
        while True:
            if not self.exchange(silent_after_s):
                return None
            heard = dict(self.heard)
            silent = {*self.others} - {
                rank for rank, last in heard.items() if last.at >= start or last.status.is_done
            }
            if time.monotonic() - start > limit_s or all(
                rank in heard and start - heard[rank].at > silent_after_s for rank in silent
            ):
                return silent
            time.sleep(_POLL_S)

    def all_arrive(self, topic: str, limit_s: float) -> bool:
        """Return True if all ranks call this with the same ``topic`` within ``limit_s``.

        A topic is used once. All calling ranks get the same answer.
        """
        if not self._is_mine:
            return False
        with contextlib.suppress(Exception):  # The store may be gone, or not answer.
            joining = in_thread(partial(self._join, topic, limit_s), name="ptdp agreement")
            return joining.result(2 * limit_s)
        return False

    def close(self) -> None:
        """Publish once more, end the thread and wait for it for at most a second.

        The thread may hang in a call to a frozen store.
        """
        if self._is_mine:
            self.end()
            self._thread.join(1.0)

    def end(self) -> None:
        """Make the thread publish once more and end."""
        if self._is_mine:
            self._closing.set()
            self._requests.put(threading.Event())

    # ---- on background threads -------------------------------------------------------------------

    def _serve(self) -> None:
        """Publish and listen until the board is closed or the store is gone."""
        request: threading.Event | None = threading.Event()
        listened_at = 0.0
        listens_every_s = max(
            self.interval_s, self.world_size * len(self.others) / _READS_PER_SECOND
        )
        try:
            while not self._closing.is_set():
                self.asking_since = time.monotonic()
                self.store.set(_key(self.rank), self.progress.status().encode())
                if request is not None or time.monotonic() - listened_at >= listens_every_s:
                    listened_at = time.monotonic()
                    self._listen()
                self.answered_at = time.monotonic()
                self.asking_since = None
                if request is not None:
                    request.set()
                try:
                    request = self._requests.get(timeout=self.interval_s)
                except queue.Empty:
                    request = None
            self.store.set(_key(self.rank), self.progress.status().encode())
        except Exception:
            # Once the store is gone, it does not come back. Return quietly, because every further
            # attempt prints torch's warnings.
            self.gone = True
            if request is not None:
                request.set()

    def _listen(self) -> None:
        store = self.store
        ranks = [
            rank for rank in self.others if rank in self.heard or self.store.check([_key(rank)])
        ]
        keys = [_key(rank) for rank in ranks]
        texts = (
            store.multi_get(keys)
            if keys and store.has_extended_api()
            else [store.get(key) for key in keys]
        )
        for rank, text in zip(ranks, texts, strict=True):
            status = RankStatus.decode(text)
            before = self.heard.get(rank)
            if before is None or before.status != status:
                lived = not status.is_done or (before is not None and before.lived)
                self.heard[rank] = Heard(status, time.monotonic(), lived)

    def _join(self, topic: str, limit_s: float) -> bool:
        """Return True if all ranks join ``topic``."""
        topic = f"lightning_ptdp/world/meeting/{topic}"
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + limit_s
        self.store.set(f"{topic}/{self.rank}", "")
        while not (joined := self.store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # The first rank to finish decides for all ranks: no rank may wait for a rank that gave up
        # just before the last one joined.
        answer = self.store.compare_set(f"{topic}/answer", "", str(joined))
        return joined and answer == str(joined).encode()


def _key(rank: int) -> str:
    return f"lightning_ptdp/status/{rank}"
