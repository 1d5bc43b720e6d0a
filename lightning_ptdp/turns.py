"""Processes that take turns in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["one_at_a_time"]

_POLL_S = 0.02


@contextlib.contextmanager
def one_at_a_time(folder: Path | None, *, limit_s: float) -> Iterator[None]:
    """Around what processes do in ``folder`` in turns.

    Who has waited for ``limit_s`` goes on, and so does everybody where the file system knows no locks. None: there is nothing to wait for.
    """
    if folder is None:
        yield
        return
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + limit_s
    try:
        while not _locked(handle) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return True
    return True
