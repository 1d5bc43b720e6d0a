"""Report about all ranks when one of them is missing, and the dump of a stuck one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.status import RankStatus, duration
from lightning_ptdp.pipeline.status_board import Heard
from lightning_ptdp.shims.torch_distributed import flight_record, is_communication_error

LOST = "lost another rank"
_MOST_LINES = 16
_MOST_CHARACTERS = 4000  # of an error, which every rank publishes
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


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
        causes = {
            rank: heard.status
            for rank, heard in sorted(self.heard.items())
            if heard.status.failure and not heard.status.failure.startswith(LOST)
        }
        text += [
            f"The cause is on rank {rank}: {causes[rank].failure} ({causes[rank].raised_at})"
            for rank in list(causes)[:1]
        ]
        return "\n".join(text)

    def lost(self) -> str:
        """Return the failure message of a rank that misses another one, for publication."""
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


def summary(error: BaseException) -> str:
    """Return the summary of an error for other ranks.

    For a lost rank the summary is only ``LOST``, because the place names the rank.
    """
    if isinstance(error, PeerError) or is_communication_error(error):
        return LOST
    return f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"


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


# ---- Dump of torch's flight recorder to a file, for a stuck rank ---------------------------------


_LIMIT_S = 5.0


def keep_flight_record(rank: int) -> str:
    """Write the flight record to a file, which replaces that of an earlier run.

    The recorder is torch's and is on by default (``TORCH_FR_BUFFER_SIZE``, formerly
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``). The ranks of one machine write into one folder of this user.
    The call takes a few seconds at most and never raises.

    Returns:
        The path of the file, or "" if there is no record.
    """

    def keep() -> str:
        path = Path(tempfile.gettempdir(), f"ptdp-flight-recorder-{os.getuid()}", f"rank_{rank}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp_path = path.with_name(f".{path.name}.{os.getpid()}")
        temp_path.write_bytes(flight_record())
        # Atomic: another job of this user on this machine may read or write the file now.
        return str(temp_path.replace(path))

    with contextlib.suppress(Exception):
        # Not on this thread: the dump takes locks that an NCCL thread may hold.
        return in_thread(keep, name="ptdp flight record").result(_LIMIT_S)
    return ""
