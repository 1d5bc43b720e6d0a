"""Time limit that does not count the time that other processes take from the tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

__all__ = ["Limit", "running"]

_HARD = 10


class Limit:
    """Count the seconds in which processes could have run.

    The time that their threads waited for a core or for a disk does not count, so that a slow test
    on a busy machine does not look like a hang. A process that hangs waits for neither; it is found
    after ``seconds``, as on an idle machine. After ten times ``seconds`` the limit is reached in
    any case.

    Args:
        seconds: The limit.
        pids: Returns the current processes; called at most once a second, first after a second.
    """

    def __init__(self, seconds: float, pids: Callable[[], Iterable[int]]) -> None:
        self.seconds, self._pids, self._start = seconds, pids, time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._on_disk = 0.0
        self._asked = self._start

    def left(self) -> float:
        """Return the seconds that are left."""
        now = time.monotonic()
        if now >= self._asked + 1:
            since, self._asked = now - self._asked, now
            self._ask(since)
        delay = sum(self._last.values()) - sum(self._first.values()) + self._on_disk
        return min(self.seconds + delay, _HARD * self.seconds) - (now - self._start)

    def _ask(self, since: float) -> None:
        pids = list(self._pids())
        if any(_waits_for_disk(pid) for pid in pids):
            self._on_disk += since
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):
                delay = _run_delay(pid)
                self._first.setdefault(pid, delay)
                # a thread that has ended is no longer counted
                self._last[pid] = max(delay, self._last.get(pid, 0.0))


def running() -> list[int]:
    """Return the processes that this one has started, and theirs."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def _run_delay(pid: int) -> float:
    """Return the seconds that the threads of a process were ready to run and had no core.

    Linux's Documentation/scheduler/sched-stats.rst, section "/proc/<pid>/schedstat".
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9


def _waits_for_disk(pid: int) -> bool:
    """Return whether a thread of a process is in uninterruptible sleep: it reads or writes a disk,
    or the memory of the machine is exhausted."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
            if thread.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
