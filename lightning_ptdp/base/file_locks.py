"""File locks for processes that take turns in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_POLL_S = 0.02


@contextlib.contextmanager
def one_at_a_time(folder: Path | None, *, limit_s: float) -> Iterator[None]:
    """Let only one process at a time run the context for ``folder``.

    A process continues without the lock after ``limit_s``. Where the file system has no locks, it
    continues at once. If ``folder`` is None, there is no lock.
    """
    if folder is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        wait_for_lock(handle, limit_s=limit_s)
        yield
    finally:
        os.close(handle)


def wait_for_lock(file: int | IO[bytes], *, limit_s: float) -> None:
    """Lock a file, or give up at the time limit.

    The call returns at once if the file system has no locks.
    """
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        while not locked(file) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def locked(file: int | IO[bytes]) -> bool:
    """Return True if this process holds the lock of a file now.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
