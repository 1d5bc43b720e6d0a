"""Processes that take turns in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["locked", "one_at_a_time", "wait_for_lock"]

_POLL_S = 0.02


@contextlib.contextmanager
def one_at_a_time(folder: Path | None, *, limit_s: float) -> Iterator[None]:
    """Around what processes do in ``folder`` in turns.

    Who has waited for ``limit_s`` goes on, and so does everybody where the file system knows no
    locks. None: there is nothing to wait for."""
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
    """Lock a file, or wait for that in vain; returns at once where the file system knows no
    locks."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        while not locked(file) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def locked(file: int | IO[bytes]) -> bool:
    """Return True if this process holds the lock of a file now.

    Raises:
        OSError: The file system knows no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
