"""Signals as requests: noted where they arrive, and acted on where nothing is torn by it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = [
    "HeldSignal",
    "SignalNotes",
    "StoppedNow",
    "breakable",
    "handled",
    "hold_requeue_signal",
    "in_main_thread",
]

_COPIES_S = 1.0  # launchers hand on what a terminal has sent to all processes already


class StoppedNow(KeyboardInterrupt):
    """The second Ctrl-C: nothing more is waited for."""


class SignalNotes:
    """Handlers that only take a note. The second Ctrl-C raises ``StoppedNow`` where it finds this
    process.

    Args:
        announcement: Written to stderr at the first Ctrl-C; "" for nothing.

    Attributes:
        received: What came.
    """

    def __init__(self, announcement: str = "") -> None:
        self.received: set[int] = set()
        self._announcement = announcement
        self._before: dict[int, Any] = {}
        self._first, self._pid = 0.0, 0

    def take(self, *numbers: int) -> None:
        """Note these signals from now on; nothing happens outside of the main thread, where Python
        allows no handlers."""
        self._pid = os.getpid()
        for number in numbers if in_main_thread() else ():
            self._before[number] = signal.signal(number, self.note)

    def give_back(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if number == signal.SIGINT:
            now = time.monotonic()
            if number in self.received:
                if now - self._first > _COPIES_S:
                    raise StoppedNow
                return
            self._first = now
            if (
                self._announcement and os.getpid() == self._pid
            ):  # forked readers of data inherit the handler
                os.write(2, f"\n{self._announcement}\n".encode())  # print may not be entered twice
        self.received.add(number)


class HeldSignal:
    """Handler of a signal that arrives before anything can act on it.

    Attributes:
        received: Whether it has arrived.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True


def hold_requeue_signal() -> None:
    """Hold SIGUSR1 in a SLURM job until ``SaveOnSignal`` acts on it; by default it would end this
    process."""
    if (
        "SLURM_JOB_ID" in os.environ
        and in_main_thread()
        and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR1, HeldSignal())


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` take a signal inside; nothing happens outside of the main thread, where
    Python allows no handlers."""
    if not in_main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def breakable() -> Iterator[None]:
    """Around a wait at the end of a run: Ctrl-C ends it with ``StoppedNow``, although Lightning
    ignores the signal by then."""
    began = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began > _COPIES_S:
            raise StoppedNow

    with handled(signal.SIGINT, stop):
        yield


def in_main_thread() -> bool:
    """Return True if Python lets this thread set handlers."""
    return threading.current_thread() is threading.main_thread()
