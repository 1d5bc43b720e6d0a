"""Time limit that excludes delays caused by other processes."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

__all__ = ["Limit", "running"]

_HARD = 10


class Limit:
    """Time limit that counts only the seconds in which processes could run.

    Time in which their threads waited for a core does not count, so a slow test on a busy machine
    does not look like a hang. A hanging process does not wait for a core and is detected after
    ``seconds``, as on an idle machine. The limit is always reached after ten times ``seconds``.

    Args:
        seconds: The limit.
        pids: Returns the current processes; called at most once a second, first after a second.
    """

    def __init__(self, seconds: float, pids: Callable[[], Iterable[int]]) -> None:
        self.seconds, self._pids, self._start = seconds, pids, time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._asked = self._start

    def left(self) -> float:
        """Return the remaining seconds."""
        now = time.monotonic()
        if now >= self._asked + 1:
            self._asked = now
            self._ask()
        delay = sum(self._last.values()) - sum(self._first.values())
        return min(self.seconds + delay, _HARD * self.seconds) - (now - self._start)

    def _ask(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(OSError, ValueError):
                delay = _run_delay(pid)
                self._first.setdefault(pid, delay)
                # An ended thread is no longer counted.
                self._last[pid] = max(delay, self._last.get(pid, 0.0))


def running() -> list[int]:
    """Return the ids of all descendants of this process."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def _run_delay(pid: int) -> float:
    """Return the seconds that ready threads of a process waited for a core.

    Linux's Documentation/scheduler/sched-stats.rst, section "/proc/<pid>/schedstat".
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9
