"""Observers of a running program: the watchdog always, the recorder for the requested steps."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ptdp.schedule.actions import Action, Schedule

__all__ = ["Observers", "StepObserver"]


class StepObserver:
    """Receiver of events of the runtime, the transport and the gradient buckets, on the thread that
    runs the program.

    Events that it does not need are not defined.
    """

    def began(self, schedule: Schedule) -> None:
        """The program of ``schedule`` starts."""

    def started(self, action: Action) -> None:
        """``action`` starts; a computation may begin by waiting for its message."""

    def waiting(self, what: str, peer: int | None) -> None:
        """The wait for global rank ``peer`` in action ``what`` begins, or with None: is over."""

    def finished(self, action: Action) -> None:
        """``action`` is done."""

    def reducing(self, stage: int | None, work: object) -> None:
        """A reduction of gradients of ``stage`` (None: of no single one) was launched;
        ``work.when_done`` tells of its end."""

    def ended(self) -> None:
        """The program is done and its messages have left. Not called when it fails."""


class Observers(StepObserver):
    """Several observers as one, in the order in which they were added."""

    def __init__(self, members: Iterable[StepObserver] = ()) -> None:
        self._members = tuple(members)

    def add(self, observer: StepObserver) -> None:
        """Tell ``observer`` too, from the next event on."""
        self._members = (*self._members, observer)

    def remove(self, observer: StepObserver) -> None:
        """Tell ``observer`` no more; nothing happens if it was not told."""
        self._members = tuple(member for member in self._members if member is not observer)

    def began(self, schedule: Schedule) -> None:
        """Tell all."""
        for member in self._members:
            member.began(schedule)

    def started(self, action: Action) -> None:
        """Tell all."""
        for member in self._members:
            member.started(action)

    def waiting(self, what: str, peer: int | None) -> None:
        """Tell all."""
        for member in self._members:
            member.waiting(what, peer)

    def finished(self, action: Action) -> None:
        """Tell all."""
        for member in self._members:
            member.finished(action)

    def reducing(self, stage: int | None, work: object) -> None:
        """Tell all."""
        for member in self._members:
            member.reducing(stage, work)

    def ended(self) -> None:
        """Tell all."""
        for member in self._members:
            member.ended()
