"""Time limits for blocks of code, for calls in a thread, and for waiting on a file lock."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

_POLL_S = 0.02
T = TypeVar("T")


class _Late(BaseException):
    """Raised in the thread whose time is up; ``except Exception`` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block if it runs longer than ``seconds``, in any thread.

    Python code is interrupted. A single call into a C library is interrupted only when it returns.

    Raises:
        TimeoutError: The block was not finished.
    """
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()

    def watch() -> None:
        if done.wait(seconds):
            return
        with lock:
            if not done.is_set():
                _raise_in(thread, _Late)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                done.set()
    except _Late:
        with lock:
            done.set()
            _raise_in(thread, None)
        raise TimeoutError(f"not finished after {seconds:g} s") from None


def in_thread(call: Callable[[], T], *, name: str = "ptdp call") -> Future[T]:
    """Start a call in a daemon thread, and return its future, which need not be awaited.

    While Python is exiting, it starts no threads. The call then runs in the caller's thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return outcome


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise ``error`` in a thread at its next instruction.

    None cancels an error that has not been raised yet.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


# ---- File locks for processes that take turns in a folder --------------------------------------


@contextmanager
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
