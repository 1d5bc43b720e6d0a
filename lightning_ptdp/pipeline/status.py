"""Status of a rank: noted by the thread that works, published by another thread, shown by the ranks
that wait for it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass
from typing import Literal

from lightning_ptdp.schedule.actions import Action

__all__ = ["LiveStatus", "RankStatus", "cause_first", "duration"]

_CAUSE = "The cause is on rank"
_SHOWN = 200  # characters of an error in the line of its rank

Phase = Literal["in", "waits in", "after", ""]


class LiveStatus:
    """Current status of this rank. One thread writes and others read; a note is one assignment, so
    that it costs next to nothing.

    Attributes:
        during: What the rank is busy with, such as "step 12"; "" between steps.
        latest: The last thing that it was busy with.
        failure: The error that ended it; "" while it lives.
        raised_at: Where in the user's code.
        ended: Whether the rank has come to its end, and will say nothing more.
        note: (phase, action, global rank that is waited for, ``time.monotonic`` of the beginning).
    """

    def __init__(self) -> None:
        self.during = self.latest = self.failure = self.raised_at = ""
        self.ended = False
        self.note: tuple[Phase, Action | str, int | None, float] = ("", "", None, time.monotonic())
        self._beats = itertools.count()

    def set(self, phase: Phase, action: Action | str = "", peer: int | None = None) -> None:
        """Note what begins now."""
        self.note = (phase, action, peer, time.monotonic())

    def status(self) -> RankStatus:
        """As of now."""
        phase, action, peer, since = self.note
        same = {
            name: getattr(self, name)
            for name in ("during", "latest", "failure", "raised_at", "ended")
        }
        age_s, beat = time.monotonic() - since, next(self._beats)
        return RankStatus(
            **same, phase=phase, action=str(action), peer=peer, age_s=age_s, beat=beat
        )


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank at the time of writing.

    Attributes:
        during, latest, failure, raised_at, ended: As in ``LiveStatus``.
        phase, action, peer: What it was doing, to which action, waiting for, or having received
            from, which global rank.
        age_s: How long it had been doing so.
        beat: Another one every time: who reads it twice knows that the rank lives.
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
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> RankStatus:
        """From ``encode``."""
        return cls(**json.loads(text))

    @property
    def is_done(self) -> bool:
        """Return True if the rank failed or has ended, so that no more news is expected."""
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
        """For people.

        Args:
            silence_s: Time since it was heard; None: it is the reader's own, and of now.
            silent_after_s: Several times the time between publications: a rank that was silent for
                longer has fallen silent.
        """
        silence = silence_s or 0.0
        if self.failure:
            return f"failed {duration(silence)} ago ({self.failure.partition(chr(10))[0][:_SHOWN]}): {self.place()}"
        if self.ended:
            return f"had come to its end {duration(silence)} ago"
        if silence > silent_after_s:
            return f"last heard {duration(silence)} ago: {self.place()}"
        told = " (this rank)" if silence_s is None else f" (told {duration(silence)} ago)"
        return f"{self.place()} since {duration(self.age_s + silence)}{told}"


def cause_first(message: str, explained: str) -> str:
    """Return an error's message and what each rank did, behind the cause on another rank if one is
    known."""
    rest, found, cause = explained.rpartition(f"\n{_CAUSE} ")
    return f"{_CAUSE} {cause}\n{message}\n{rest}" if found else f"{message}\n{explained}".rstrip()


def duration(seconds: float) -> str:
    """ "0.3 s", "29 s"."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
