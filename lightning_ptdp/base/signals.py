"""Signals as requests: recorded on arrival, and handled at a point where it is safe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_COPIES_S = 1.0  # launchers forward a signal that a terminal has already sent to all processes


class StoppedNow(KeyboardInterrupt):
    """The second Ctrl-C: all waiting ends."""


class SignalNotes:
    """Signal handlers that only record the signal.

    The second Ctrl-C raises ``StoppedNow`` in the running code.

    Args:
        announcement: Written to stderr at the first Ctrl-C; "" for nothing.

    Attributes:
        received: The received signals.
    """

    def __init__(self, announcement: str = "") -> None:
        self.received: set[int] = set()
        self._announcement = announcement
        self._before: dict[int, Any] = {}
        self._first = 0.0
        self._pid = 0

    def take(self, *numbers: int) -> None:
        """Record these signals from now on.

        Outside of the main thread, where Python allows no handlers, the call does nothing.
        """
        self._pid = os.getpid()
        for number in numbers if in_main_thread() else ():
            self._before[number] = signal.signal(number, self.note)

    def give_back(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; this method is the handler."""
        if number == signal.SIGINT:
            now = time.monotonic()
            if number in self.received:
                if now - self._first > _COPIES_S:
                    raise StoppedNow
                return
            self._first = now
            # Forked data workers inherit the handler: only the original process announces.
            if self._announcement and os.getpid() == self._pid:
                os.write(2, f"\n{self._announcement}\n".encode())  # print is not reentrant
        self.received.add(number)


class HeldSignal:
    """Handler of a signal that arrives before it can be handled.

    Attributes:
        received: Whether it has arrived.
    """

    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True


@dataclass(frozen=True)
class HandlerOfProcess:
    """Handler of a signal that serves the process that sets it; forked ranks replace it."""

    handle: Callable[[int, FrameType | None], None]
    process: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Return True if this process was forked from the one that has set the handler."""
        return os.getpid() != self.process

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.handle(number, frame)


def hold_requeue_signal() -> None:
    """Hold SIGUSR1 in a SLURM job until ``SaveOnSignal`` handles it.

    By default the signal would end this process.
    """
    if (
        "SLURM_JOB_ID" in os.environ
        and in_main_thread()
        and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR1, HeldSignal())


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` take a signal inside the context.

    Outside of the main thread, where Python allows no handlers, the context does nothing.
    """
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
    """Let Ctrl-C end a wait at the end of a run with ``StoppedNow``.

    Lightning already ignores the signal at that time.
    """
    start = time.monotonic()

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - start > _COPIES_S:
            raise StoppedNow

    with handled(signal.SIGINT, stop):
        yield


def in_main_thread() -> bool:
    """Return True if Python lets this thread set handlers."""
    return threading.current_thread() is threading.main_thread()
