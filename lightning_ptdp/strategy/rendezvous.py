"""Rendezvous of the ranks, repeated after every restart; errors name the lost ranks.

torchrun keeps one store for all its restarts, and the store still holds addresses of ended
processes. A rank that reads these addresses before the new ones are written connects to no process.
An *attempt* of the job is the time from one start of all ranks to the next restart. The ranks of
one attempt agree on a name for it, and use that name as the prefix of all their keys::

    rank r    sets call/r to a name of its own, N
    rank 0    answers every N that it finds with the name of this attempt, A,
              until all ranks have set A/came/r; then it sets A/all
    rank r    compares its versions of the libraries with those of rank 0

torch waits without a limit, in C++, for a store that does not respond. All requests to a store
therefore run in another thread (``_InThread``). The calling thread watches the time and lost ranks,
and logs the ranks for which it waits."""

from __future__ import annotations

import functools
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lightning_ptdp.base.errors import numbered
from lightning_ptdp.base.requirements import RequirementError, versions_that_matter
from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.torch_distributed import is_communication_error
from lightning_ptdp.strategy.expected_ranks import ExpectedRanks, has_ended, this_process

_CALL = "lightning_ptdp/call"
_ANSWER = "lightning_ptdp/answer"
_CAME = "lightning_ptdp/came"
_ALL = "lightning_ptdp/all"
_LOST = "lightning_ptdp/lost"
_VERSIONS = "lightning_ptdp/versions"
_ROLL = "lightning_ptdp/roll"
_HERE = "lightning_ptdp/here"
_KNOWS = "lightning_ptdp/knows"
_ANSWERS_S = 2.0
_SILENT_S = 6.0
_POLL_S = 0.02
_LOOK_S = 0.1
_LISTEN_S = 0.25
_KNOWN_S = 1.0
_GRACE = 1.1  # multiple of the limit; torch's own error, which says more, comes earlier

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def join(
    expected: ExpectedRanks,
    *,
    open_store: Callable[[], dist.Store],
    make: Callable[[dist.Store], _T],
    limit: timedelta,
    ended: Callable[[], str] = lambda: "",
) -> _T:
    """Join the other ranks, and return the result of ``make`` for the store of this attempt.

    ``make`` is called in another thread and passes the store to ``init_process_group``.

    Args:
        expected: This rank and the expected ranks.
        open_store: Opens, or connects to, the store that all ranks share.
        make: Makes the process groups.
        limit: Time limit of every wait.
        ended: Returns which processes have ended, as far as their parent knows; "" if none.

    Raises:
        PeerError: A rank did not join, or a rank was lost meanwhile. The message names the ranks
            that did not join, or else the ranks that did not report the loss.
    """
    thread = _InThread(expected, limit, ended)
    shared: dist.Store | None = None
    attempt = ""
    try:
        shared = thread.run(
            open_store, f"connecting to the store at {expected.where}", expected.first_of_all
        )
        shared.set_timeout(limit)
        if expected.rank == 0:
            attempt = uuid.uuid4().hex
        else:
            attempt = thread.run(
                lambda: _called(shared, expected.rank), "contacting rank 0", expected.first_of_all
            )
        attempt_store = dist.PrefixStore(attempt, shared)
        thread.listen(shared, attempt)
        missing = list(range(expected.world_size))
        thread.run(
            lambda: _meet(shared, attempt_store, attempt, expected, missing, limit),
            "waiting for all ranks",
            lambda: expected.missing([*missing]),
        )
        result = thread.run(lambda: make(attempt_store), "creating the process groups", lambda: "")
        thread.close(patience_s=limit.total_seconds())
        return result
    except Exception as error:
        if not is_communication_error(error):
            raise
        reason = thread.lost
        if not reason and shared is not None and attempt:
            # Rank 0 ends, with the store, once the listening thread knows the lost ranks.
            reason = _lost(shared, attempt, expected) or thread.lost or expected.silent()
        elif not reason:
            reason = expected.unanswered(shared is not None)
        raise PeerError(
            f"rank {expected.rank} could not join the other ranks: {reason}, while {thread.doing}: "
            f"{error}"
        ) from error
    finally:
        thread.close()


class _InThread:
    """Runner of blocking calls in another thread; a call is abandoned after the time limit."""

    def __init__(self, expected: ExpectedRanks, limit: timedelta, ended: Callable[[], str]) -> None:
        self._expected = expected
        self._limit = limit.total_seconds()
        self._ended = ended
        self._notes: dist.Store | None = None
        self._closed = threading.Event()
        self._listening: threading.Thread | None = None
        self._heard = float("inf")
        self.doing = ""
        """Purpose of the last call of ``run``."""
        self.lost = ""
        """The lost ranks, once they are known."""

    def run(self, action: Callable[[], _T], doing: str, waits_for: Callable[[], str]) -> _T:
        """Return the result of ``action``, or raise its error.

        Raises:
            DistNetworkError: The time limit expired, or a rank was lost.
        """
        self.doing = doing
        outcome = in_thread(action)
        started = last_warning = time.monotonic()
        while not wait([outcome], min(_LOOK_S, self._limit)).done:
            now = time.monotonic()
            self._look()
            if self.lost:
                raise dist.DistNetworkError("aborted")
            if now - started > _GRACE * self._limit:
                self._hear()
                raise dist.DistNetworkError(f"no answer within {self._limit:g} s")
            if now - last_warning > self._expected.say_every_s and (text := waits_for()):
                _log.warning(
                    "rank %d has waited %.0f s %s", self._expected.rank, now - started, text
                )
                last_warning = now
        error = outcome.exception()
        # A lost rank makes torch fail on the other ranks. Its number is known a moment later.
        if error is not None and is_communication_error(error):
            self._look(patience_s=_KNOWN_S)
            self._hear()
        return outcome.result()

    def listen(self, shared: dist.Store, attempt: str) -> None:
        """Start to listen for lost ranks.

        The listening thread reads the other ranks' notes and watches processes of this machine."""
        self._heard = time.monotonic()
        self._listening = threading.Thread(
            target=self._listen, args=(shared, attempt), name="ptdp-listening", daemon=True
        )
        self._listening.start()

    def close(self, *, patience_s: float = _KNOWN_S) -> None:
        """Stop listening."""
        self._closed.set()
        if self._listening is not None:
            # A thread that returns from C++ while Python exits aborts the process.
            self._listening.join(patience_s)

    def _look(self, *, patience_s: float = 0.0) -> None:
        deadline = time.monotonic() + patience_s
        while not self.lost:
            self.lost = self._ended()
            if self.lost and self._notes is not None:
                wait([in_thread(functools.partial(self._notes.set, _LOST, self.lost))], _ANSWERS_S)
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _hear(self) -> None:
        if time.monotonic() - self._heard > _SILENT_S:
            self.lost = self.lost or self._expected.silent()

    def _listen(self, shared: dist.Store, attempt: str) -> None:
        # Use a separate connection, because another thread may be waiting on the first.
        processes: dict[int, str] = {}
        try:
            notes = self._notes = dist.PrefixStore(attempt, shared.clone())
            while not self._closed.wait(_LISTEN_S):
                self._heard = time.monotonic()
                if notes.check([_ROLL]):
                    notes.set(f"{_HERE}/{self._expected.rank}", "")
                if notes.check([_LOST]):
                    self.lost = self.lost or notes.get(_LOST).decode()
                    notes.set(f"{_KNOWS}/{self._expected.rank}", "")
                    return
                for rank in self._expected.watched:
                    if rank not in processes and notes.check([f"{_CAME}/{rank}"]):
                        processes[rank] = notes.get(f"{_CAME}/{rank}").decode()
                dead = [rank for rank, process in processes.items() if has_ended(process)]
                if dead and not self._closed.is_set():
                    notes.set(
                        _LOST,
                        f"{numbered('rank', dead)} joined and then disappeared (the process has ended)",
                    )
        except dist.DistError:
            if not self._closed.is_set():
                self.lost = self.lost or f"{self._expected.host} has ended"


def _called(shared: dist.Store, rank: int) -> str:
    """Call rank 0 and return its answer."""
    name = uuid.uuid4().hex
    shared.set(f"{_CALL}/{rank}", name)
    return shared.get(f"{_ANSWER}/{name}").decode()


def _meet(
    shared: dist.Store,
    attempt_store: dist.Store,
    attempt: str,
    expected: ExpectedRanks,
    missing: list[int],
    limit: timedelta,
) -> None:
    """Join, and wait until all ranks have joined.

    Rank 0 answers the calls of the other ranks and keeps ``missing`` up to date. It also answers
    calls of ended processes, which has no effect."""
    attempt_store.set(f"{_CAME}/{expected.rank}", this_process())
    if expected.rank:
        missing.clear()
        attempt_store.get(_ALL)
        _compare_versions(attempt_store, expected.rank)
        return
    attempt_store.set(_VERSIONS, json.dumps(versions_that_matter()))
    deadline = time.monotonic() + limit.total_seconds()
    answered = set[bytes]()
    while True:
        for rank in missing:
            if not rank or not shared.check([f"{_CALL}/{rank}"]):
                continue
            name = shared.get(f"{_CALL}/{rank}")
            if name not in answered:
                answered.add(name)
                shared.set(f"{_ANSWER}/{name.decode()}", attempt)
        missing[:] = [rank for rank in missing if not attempt_store.check([f"{_CAME}/{rank}"])]
        if not missing:
            break
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"{expected.world_size - len(missing)} of {expected.world_size} ranks joined within "
                f"{limit.total_seconds():g} s"
            )
        time.sleep(_POLL_S)
    attempt_store.set(_ALL, "")


def _compare_versions(attempt_store: dist.Store, rank: int) -> None:
    """Compare the installed versions with those of rank 0.

    Raises:
        RequirementError: They differ. The other ranks report the same reason.
    """
    mine = versions_that_matter()
    first = json.loads(attempt_store.get(_VERSIONS))
    for name in sorted(mine.keys() | first.keys()):
        here, there = (found.get(name, "none") for found in (mine, first))
        if here != there:
            reason = f"rank {rank} on {socket.gethostname()} has {name} {here}, rank 0 has {there}"
            attempt_store.set(_LOST, reason)
            raise RequirementError(f"{reason}. Install the same versions on all machines")


def _lost(shared: dist.Store, attempt: str, expected: ExpectedRanks) -> str:
    """Return the lost ranks; "" if the store does not answer."""
    # An abandoned thread may occupy the existing connection.
    outcome = in_thread(
        lambda: _missed(
            dist.PrefixStore(attempt, shared.clone()), expected.rank, expected.world_size
        )
    )
    try:
        return outcome.result(_SILENT_S)
    except (TimeoutError, dist.DistError):
        return ""


def _missed(attempt_store: dist.Store, rank: int, world_size: int) -> str:
    silent = [peer for peer in range(world_size) if peer != rank]
    attempt_store.set_timeout(timedelta(seconds=_ANSWERS_S))
    attempt_store.set(f"{_HERE}/{rank}", "")
    attempt_store.set(_ROLL, "")
    silent = _without(attempt_store, silent, _HERE, enough=1)
    absent = [peer for peer in silent if not attempt_store.check([f"{_CAME}/{peer}"])]
    lost = numbered("rank", silent) if silent else "one rank"
    reason = f"{lost} joined and then disappeared"
    if absent:
        reason = f"{numbered('rank', absent)} did not join"
    # Notify ranks that began later and have not noticed yet, because the store may end with rank 0.
    attempt_store.set(_LOST, reason)
    attempt_store.set(f"{_KNOWS}/{rank}", "")
    if rank == 0:
        _without(
            attempt_store,
            [peer for peer in range(1, world_size) if peer not in (absent or silent)],
            _KNOWS,
            patience_s=_SILENT_S,
        )
    return reason


def _without(
    attempt_store: dist.Store,
    ranks: list[int],
    key: str,
    *,
    enough: int = 0,
    patience_s: float = _ANSWERS_S,
) -> list[int]:
    """Return the ranks that have not left a note.

    Waits until at most ``enough`` of them are missing, or until a time limit."""
    deadline = time.monotonic() + patience_s
    while True:
        ranks = [rank for rank in ranks if not attempt_store.check([f"{key}/{rank}"])]
        if len(ranks) <= enough or time.monotonic() > deadline:
            return ranks
        time.sleep(_POLL_S)
