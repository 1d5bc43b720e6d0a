"""Status of a rank, and the report about all ranks when one of them is missing.

A rank's main thread writes its status, and a second thread publishes it (``status_board.py``).
Ranks that wait for this rank show it in their messages.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from lightning_ptdp.schedule.actions import Action

LOST = "lost another rank"
_CAUSE = "The cause is on rank "
_ENDED_EARLY = (
    "ended its loop earlier: it had fewer batches (a dataset without a length), or stopped alone "
    "(should_stop). All ranks need the same number of steps"
)
_SHOWN = 200  # characters of an error in the line of its rank
_MOST_LINES = 16
_PACKAGE = os.path.dirname(os.path.dirname(__file__))

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


@dataclass(frozen=True)
class Heard:
    """The last status received from a rank.

    Attributes:
        status: The status.
        at: Time of reception, as ``time.monotonic`` of this process. Clocks of other machines do
            not matter.
        lived: Whether a status was received while the rank was alive. False for a final status that
            an earlier run left in this store.
    """

    status: RankStatus
    at: float
    lived: bool


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Status of all ranks as one rank knows it.

    Attributes:
        rank: The reporting rank.
        own: Its own last status.
        world_size: Number of ranks.
        asked: Ranks that it listens to.
        heard: Last statuses of these ranks.
        missing: Ranks among them that do not answer.
        as_of: Time of the last received status, as ``time.monotonic``.
        store_answers: Whether the store still answers; None if there was never a connection.
        silent_after_s: Silence in seconds after which a rank counts as silent.
    """

    rank: int
    own: RankStatus
    world_size: int
    asked: Sequence[int] = ()
    heard: Mapping[int, Heard] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    as_of: float = 0.0
    store_answers: bool | None = None
    silent_after_s: float = 1.0

    def text(self) -> str:
        """Return one line per rank, then the ranks that do not answer, and the cause if known."""
        lines = {rank: self._sentence(rank) for rank in self.heard}
        if self.store_answers:
            lines |= {rank: "has not reported yet" for rank in self.asked if rank not in self.heard}
        status = replace(self.own, failure="", ended=False)
        lines[self.rank] = status.sentence(silence_s=None, silent_after_s=self.silent_after_s)
        ranks = sorted([self.rank, *self._suspects(lines.keys() - {self.rank})])
        text = ["Last action of each rank:", *(f"  rank {rank}: {lines[rank]}" for rank in ranks)]
        if self.store_answers is False:
            detail = (
                "the lines above are older"
                if self.heard
                else "the last actions of the other ranks are unknown"
            )
            text.append(
                "  rank 0 (or torchrun), which hosts the store for these reports, has not "
                f"answered for {duration(time.monotonic() - self.as_of)}: {detail}"
            )
        elif len(ranks) < self.world_size:
            text.append(f"  … and {self.world_size - len(ranks)} other ranks")
        for rank in sorted(self.missing)[:_MOST_LINES]:
            detail = "which has not reported yet"
            if rank in self.heard:
                detail = (
                    f"for {duration(time.monotonic() - self.heard[rank].at)}: "
                    f"{self.heard[rank].status.place()}"
                )
            text.append(f"No answer from rank {rank}, {detail}")
        causes = [
            f"{_CAUSE}{rank}: {heard.status.failure} ({heard.status.raised_at})"
            for rank, heard in sorted(self.heard.items())
            if heard.status.failure and not heard.status.failure.startswith(LOST)
        ] + [
            f"{_CAUSE}{rank}, which {_ENDED_EARLY}"
            for rank, heard in sorted(self.heard.items())
            if heard.status.ended and not heard.status.failure and not self.missing
        ]
        text += causes[:1]
        return "\n".join(text)

    def lost(self) -> str:
        """Return the message of a rank that got no answer from another one, for publication."""
        ranks = ", ".join(str(rank) for rank in sorted(self.missing)[:_MOST_LINES])
        return f"{LOST}: no answer from rank {ranks}" if ranks else LOST

    def is_known(self) -> bool:
        """Return True if all answering ranks have named the missing rank, or have ended."""
        answering = self.heard.keys() - self.missing
        all_done = all(
            self.heard[rank].status.is_done and self.heard[rank].status.failure != LOST
            for rank in answering
        )
        return all_done and len(self.asked) == self.world_size - 1

    def _sentence(self, rank: int) -> str:
        until = time.monotonic() if self.store_answers else self.as_of
        heard = self.heard[rank]
        return heard.status.sentence(
            silence_s=max(until - heard.at, 0.0), silent_after_s=self.silent_after_s
        )

    def _suspects(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks to name if there are too many.

        Ranks without a status come first, then failed ranks, then the ranks with the oldest action.
        """

        def suspicion(rank: int) -> tuple[bool, bool, float]:
            heard = self.heard.get(rank)
            if heard is None:
                return (True, True, 0.0)
            return (False, bool(heard.status.failure), heard.status.age_s - heard.at)

        return sorted(ranks, key=suspicion, reverse=True)[: _MOST_LINES - 1]


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line outside of installed packages and of this package."""
    user_frames = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(_PACKAGE)
    ]
    return "".join(
        f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        for frame in (user_frames or frames)[-1:]
    )


def cause_first(message: str, explained: str) -> str:
    """Return an error's message and each rank's last action.

    If the cause on another rank is known, it comes first.
    """
    report, sep, cause = explained.rpartition(f"\n{_CAUSE}")
    return f"{_CAUSE}{cause}\n{message}\n{report}" if sep else f"{message}\n{explained}".rstrip()


def duration(seconds: float) -> str:
    """Return a duration as text, such as "0.3 s" or "29 s"."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
