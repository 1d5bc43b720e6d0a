"""Detection of a hung rank, where its own waits raise no error.

With gloo, a wait that takes too long raises an error. With NCCL, a wait only queues work for the
device. The host blocks wherever it next reads a result, in a C++ call that may never return. Only
another thread can notice this. That thread never touches the device. It reads the notes of the main
thread (the current action and its start) and the statuses received from the other ranks
(status_board.py):

======================================================  =======================  =================
condition                                               ends with NCCL           ends with gloo
======================================================  =======================  =================
another rank failed, and this one is stuck              for 10 s, or half of     for 1.2 x limit
                                                        the limit
another rank, or the store, is silent for the limit,    for the limit            for 1.2 x limit
and this one is stuck
this rank is stuck, and its main thread was in one      for 1.1 x limit          never
single call for half of the limit
this rank failed, and does not end                      for the limit            never
======================================================  =======================  =================

A rank is "stuck" while it is in one action of a step, one collective or one save. Between these
(data loader, callbacks, loggers, other host code of the user) it is not watched, with one
exception: with NCCL, a rank that failed or became silent ends the other ranks after the limit there
too. Long-running Python code, such as a compilation, is never in one single call. The time during
which a process was stopped or a machine slept does not count. If several conditions hold, the
message names the failure of another rank, or else the silence of another rank if it has lasted for
half of the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.pipeline.rank_status import LOST, Heard, duration
from lightning_ptdp.shims.torch_distributed import abort_process_groups, flight_record

_FAILED_S = 10.0
_FAILED_AT = 0.5  # of the limit: early enough that the stuck rank ends first for this reason
_ABORT_S = 5.0
_RECORD_S = 5.0
_GIVES_UP_AT = 1.1  # of the limit
_GRACE = 1.2  # of the limit, at which gloo's waits raise


@dataclass(frozen=True, kw_only=True)
class GuardObservation:
    """Observable state of a rank at one instant.

    Attributes:
        now: Time of the observation, as ``time.monotonic``.
        note: Current activity; a new object for every new activity.
        watched: Whether the rank is in a step, a collective or a save.
        failed: Whether the rank has noted a failure of its own.
        heard: Last statuses of the other ranks.
        answered_at: Time of the store's last answer.
        unanswered_s: Time for which the store has not answered.
        pulse: Counter of the main thread's heartbeats. It has changed if the main thread has run
            Python code since the last request; None if no heartbeat was requested.
    """

    now: float
    note: object
    watched: bool
    failed: bool = False
    heard: Mapping[int, Heard] = field(default_factory=dict)
    answered_at: float = 0.0
    unanswered_s: float = 0.0
    pulse: int | None = None


@dataclass(kw_only=True, eq=False)
class HangJudge:
    """Decides from successive observations whether to end this process.

    Args:
        limit_s: Time limit of a wait for another rank.
        interval_s: Time between two observations. A longer pause counts as at most two intervals.
        waits_raise: Whether waits raise at the limit by themselves, as gloo's do.
    """

    limit_s: float
    interval_s: float
    waits_raise: bool
    _clock: float = 0.0
    _last: float = float("inf")
    _since: dict[object, tuple[object, float]] = field(default_factory=dict)

    def look(self, seen: GuardObservation) -> str:
        """Return the reason to end this process; "" if there is none."""
        self._clock += min(max(seen.now - self._last, 0.0), 2 * self.interval_s)
        self._last = seen.now
        stuck = self._unchanged("note", (seen.note, seen.failed))
        failures = self._failures(seen)
        silences = self._silences(seen)
        calls = self._in_one_call(seen)
        if seen.failed:
            if stuck > self.limit_s and not self.waits_raise:
                return "it failed, but does not end"
            return ""
        if self.waits_raise and not seen.watched:
            return ""
        patience = _GRACE * self.limit_s if self.waits_raise else self.limit_s
        failure_limit = min(_FAILED_AT * self.limit_s, _FAILED_S) if seen.watched else patience
        failed = [rank for rank, time_s in failures.items() if time_s > failure_limit]
        if failed and stuck > (patience if self.waits_raise else failure_limit):
            return _failure(seen, failed[0])
        if stuck <= patience:
            return ""
        reason = self._own_reason(
            silences, calls if seen.watched and stuck > _GIVES_UP_AT * self.limit_s else 0.0
        )
        causes = [rank for rank in failures if not seen.heard[rank].status.failure.startswith(LOST)]
        return _failure(seen, causes[0]) if reason and causes else reason

    def _own_reason(self, silences: Mapping[str, float], call_s: float) -> str:
        is_stuck = not self.waits_raise and call_s > self.limit_s / 2
        # A rank that became silent while this one was stuck is the cause, even if its silence is
        # shorter than the limit.
        limit_s = self.limit_s / 2 if is_stuck else self.limit_s
        if silent := [name for name, time_s in silences.items() if time_s > limit_s]:
            return f"{silent[0]} has not reported for {duration(silences[silent[0]])}"
        return f"it has been in one call for {duration(call_s)}" if is_stuck else ""

    def _unchanged(self, key: object, value: object) -> float:
        """Return the time in seconds for which ``value`` has been the same."""
        if key not in self._since or self._since[key][0] != value:
            self._since[key] = (value, self._clock)
        return self._clock - self._since[key][1]

    def _in_one_call(self, seen: GuardObservation) -> float:
        if seen.pulse is None:
            self._since.pop("pulse", None)
            return 0.0
        return self._unchanged("pulse", seen.pulse)

    def _failures(self, seen: GuardObservation) -> dict[int, float]:
        """Return, by rank, the time for which it has been known to have failed.

        Statuses from an earlier training in this world do not count.
        """
        failed = {
            rank: heard.status.failure for rank, heard in sorted(seen.heard.items()) if heard.lived
        }
        return {
            rank: self._unchanged(("failed", rank), bool(failure))
            for rank, failure in failed.items()
            if failure
        }

    def _silences(self, seen: GuardObservation) -> dict[str, float]:
        """Return, by name, the time for which a rank or the store has been silent.

        A rank is silent if it sends nothing although the store answers.
        """
        silences = {
            f"rank {rank}": min(self._unchanged(rank, heard), seen.answered_at - heard.at)
            for rank, heard in sorted(seen.heard.items())
            if not heard.status.is_done
        }
        store = min(self._unchanged("store", seen.answered_at), seen.unanswered_s)
        return {
            **silences,
            "rank 0 (or torchrun), which hosts the store,": store if seen.watched else 0.0,
        }


def _failure(seen: GuardObservation, rank: int) -> str:
    return f"rank {rank} failed ({seen.heard[rank].status.failure})"


class HangGuard:
    """Thread that calls ``look`` every ``interval_s`` seconds.

    It ends when the guard is closed or garbage collected, or when ``look`` returns False.
    """

    def __init__(self, look: Callable[[], bool], *, interval_s: float) -> None:
        closing = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(look, interval_s, closing), name="ptdp guard", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, closing.set)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Stop the thread and wait for it for at most a second.

        The thread may hang in ``look``, in a call to a frozen store.
        """
        self._finalizer()
        self._thread.join(1.0)


def _watch(look: Callable[[], bool], interval_s: float, closing: threading.Event) -> None:
    with contextlib.suppress(ReferenceError):  # the owner has been garbage collected
        while not closing.wait(interval_s) and look():
            pass


class Heartbeat:
    """Detector of a main thread that is inside one call that does not return."""

    def __init__(self) -> None:
        self.beats = 0
        self._asked = False
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._beat)
        # A pending call cannot be cancelled, so its callback must stay alive for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._call))

    def ask(self) -> int:
        """Ask the main thread to count at its next instruction, and return the current count."""
        if not self._asked:
            self._asked = True
            ctypes.pythonapi.Py_AddPendingCall(self._call, None)
        return self.beats

    def _beat(self, _: object) -> int:
        self.beats = self.beats + 1
        self._asked = False
        return 0


def give_up() -> NoReturn:
    """Abort the process groups if possible within a time limit, and end this process at once."""
    aborting = threading.Thread(target=abort_groups, name="ptdp abort", daemon=True)
    aborting.start()
    aborting.join(_ABORT_S)
    os._exit(1)


def abort_groups() -> None:
    """Abort the process groups; a failure is ignored."""
    with contextlib.suppress(Exception):
        abort_process_groups()


def keep_flight_record(rank: int) -> str:
    """Write torch's flight record to a file, which replaces that of an earlier run.

    torch's flight recorder is on by default (``TORCH_FR_BUFFER_SIZE``, formerly
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``). All ranks of one machine write into the same folder of this
    user. The call takes at most a few seconds and never raises.

    Returns:
        The path of the file, or "" if there is no record.
    """

    def keep() -> str:
        path = Path(tempfile.gettempdir(), f"ptdp-flight-recorder-{os.getuid()}", f"rank_{rank}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp_path = path.with_name(f".{path.name}.{os.getpid()}")
        with temp_path.open("xb") as file:  # never through a link in a folder of another user
            file.write(flight_record())
        # Atomic: another job of this user on this machine may read or write the file now.
        return str(temp_path.replace(path))

    with contextlib.suppress(Exception):
        # Not on this thread: the dump takes locks that an NCCL thread may hold.
        return in_thread(keep, name="ptdp flight record").result(_RECORD_S)
    return ""
