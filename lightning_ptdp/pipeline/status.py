"""Status of a rank: written by its main thread, published by a second thread.

Ranks that wait for this rank show it in their messages.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass
from typing import Literal

from lightning_ptdp.schedule.actions import Action

_CAUSE = "The cause is on rank"
_SHOWN = 200  # characters of an error in the line of its rank

Phase = Literal["in", "waits in", "after", ""]


class LiveStatus:
    """Current status of this rank.

    One thread writes and other threads read. A note is one assignment, so that it costs almost
    nothing.

    Attributes:
        during: Current activity of the rank, such as "step 12"; "" between steps.
        latest: Last activity of the rank.
        failure: The error that ended it; "" while it is alive.
        raised_at: Place of the error in the user's code.
        ended: Whether the rank has ended and will publish no more.
        note: (phase, action, global rank that is waited for, ``time.monotonic`` at the start).
    """

    def __init__(self) -> None:
        self.during = self.latest = self.failure = self.raised_at = ""
        self.ended = False
        self.note: tuple[Phase, Action | str, int | None, float] = ("", "", None, time.monotonic())
        self._beats = itertools.count()

    def set(self, phase: Phase, action: Action | str = "", peer: int | None = None) -> None:
        """Note the start of a phase."""
        self.note = (phase, action, peer, time.monotonic())

    def status(self) -> RankStatus:
        """Return the status at this moment."""
        phase, action, peer, since = self.note
        fields = {
            name: getattr(self, name)
            for name in ("during", "latest", "failure", "raised_at", "ended")
        }
        age_s = time.monotonic() - since
        beat = next(self._beats)
        return RankStatus(
            **fields, phase=phase, action=str(action), peer=peer, age_s=age_s, beat=beat
        )


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank at the time of writing.

    Attributes:
        during, latest, failure, raised_at, ended: As in ``LiveStatus``.
        phase, action, peer: Phase, its action, and the global rank that it waits for or has
            received from.
        age_s: Duration of the phase so far.
        beat: A number that changes with every status, so that a reader of two statuses sees that
            the rank is alive.
    """

    during: str
    latest: str
    phase: Phase
    action: str
    peer: int | None
    failure: str
    raised_at: str
    ended: bool
    age_s: float
    beat: int

    def encode(self) -> str:
        """Return the status as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> RankStatus:
        """Return the status that ``encode`` wrote."""
        return cls(**json.loads(text))

    @property
    def is_done(self) -> bool:
        """Return True if the rank failed or has ended, so that no more statuses are expected."""
        return self.ended or bool(self.failure)

    def place(self) -> str:
        """Return the rank's place, such as "step 12, waits in B1.2 for rank 2"."""
        if not self.during:
            return f"after {self.latest}" if self.latest else "before its first step"
        peer = (
            f" {'for' if self.phase == 'waits in' else 'with'} rank {self.peer}"
            if self.peer is not None
            else ""
        )
        return f"{self.during}, {self.phase} {self.action}{peer}" if self.phase else self.during

    def sentence(self, *, silence_s: float | None, silent_after_s: float) -> str:
        """Return the status as a readable phrase.

        Args:
            silence_s: Time since the status was received; None for the reader's own, current
                status.
            silent_after_s: Silence after which a rank counts as silent, several times the
                publication interval.
        """
        silence = silence_s or 0.0
        if self.failure:
            return (
                f"failed {duration(silence)} ago ({self.failure.partition(chr(10))[0][:_SHOWN]}): "
                f"{self.place()}"
            )
        if self.ended:
            return f"ended normally {duration(silence)} ago"
        if silence > silent_after_s:
            return f"last reported {duration(silence)} ago: {self.place()}"
        suffix = " (this rank)" if silence_s is None else f" (reported {duration(silence)} ago)"
        return f"{self.place()} since {duration(self.age_s + silence)}{suffix}"


def cause_first(message: str, explained: str) -> str:
    """Return an error's message and each rank's last action.

    If the cause on another rank is known, it comes first.
    """
    report, sep, cause = explained.rpartition(f"\n{_CAUSE} ")
    return f"{_CAUSE} {cause}\n{message}\n{report}" if sep else f"{message}\n{explained}".rstrip()


def duration(seconds: float) -> str:
    """Return a duration as text, such as "0.3 s" or "29 s"."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
