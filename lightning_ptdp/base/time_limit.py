"""Time limits for code in this process: it is interrupted, or a thread with it is abandoned."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

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
    """Start a call in a daemon thread, and return its future, for which nothing has to wait.

    While Python is exiting, it starts no threads. The call then runs in the caller's.
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
