"""Observers of a running program: the watchdog always, the recorder for the requested steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_ptdp.schedule.actions import Action, Schedule


class StepObserver:
    """Receiver of events of the runtime, the transport and the gradient buckets.

    Events arrive on the thread that runs the program. A subclass defines only the events that it
    needs.
    """

    def began(self, schedule: Schedule) -> None:
        """Handle the start of the program of ``schedule``."""

    def started(self, action: Action) -> None:
        """Handle the start of ``action``; a computation may begin by waiting for its message."""

    def waiting(self, what: str, peer: int | None) -> None:
        """Handle the start of a wait for global rank ``peer``, or with None its end.

        ``what`` is the action that waits.
        """

    def finished(self, action: Action) -> None:
        """Handle the end of ``action``."""

    def reducing(self, stage: int | None, work: object) -> None:
        """Handle the launch of a gradient reduction of ``stage``.

        ``stage`` is None if the reduction belongs to several stages or to none. ``work.when_done``
        registers a callback for its end.
        """

    def ended(self) -> None:
        """Handle the end of the program, when its messages have left.

        It is not called when the program fails.
        """


def _forwarded(event: str) -> Any:
    """Return a method that passes an event to all members."""

    def forward(observers: Observers, *details: object) -> None:
        for member in observers._members:
            getattr(member, event)(*details)

    return forward


class Observers(StepObserver):
    """Several observers as one, in the order in which they were added."""

    def __init__(self, members: Iterable[StepObserver] = ()) -> None:
        self._members = tuple(members)

    def add(self, observer: StepObserver) -> None:
        """Send events to ``observer`` too, from the next event on."""
        self._members = (*self._members, observer)

    def remove(self, observer: StepObserver) -> None:
        """Stop sending events to ``observer``; do nothing if it was not added."""
        self._members = tuple(member for member in self._members if member is not observer)

    began = _forwarded("began")
    started = _forwarded("started")
    waiting = _forwarded("waiting")
    finished = _forwarded("finished")
    reducing = _forwarded("reducing")
    ended = _forwarded("ended")
