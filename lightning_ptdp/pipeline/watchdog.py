"""Nothing hangs silently: a rank that does not hear from another raises an error that says what every rank did last.

Each rank notes what it is doing and publishes that about once a second (bulletin.py), since a frozen process cannot be asked any more.
The limit itself is that of the process groups: with gloo a wait that is too long raises. With NCCL a wait only queues work for the
GPU, and in the end torch kills the process; so there the watchdog writes its report to stderr shortly before.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_ptdp._torch import default_store
from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.pipeline.actions import Action, Schedule
from lightning_ptdp.pipeline.bulletin import Bulletin
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.status import LiveStatus, RankStatus, duration

__all__ = ["Watchdog", "is_communication_error"]

_ANSWER_LIMIT_S = 2.0
_PUBLISH_LIMIT_S = 1.0
_MOST_LINES = 16
_RANKS_PER_SECOND = 1000  # publications that the store's host should have to take
_SILENT_INTERVALS = 4
_ALL_WATCHED = 64  # ranks up to which a rank asks for all of them, and not for those of its own groups only
_REPORT_AT = 0.9  # of the limit: at the whole of it torch ends the process

_LOST = "lost another rank"
_PACKAGE = os.path.dirname(os.path.dirname(__file__))

_GLOO_ERROR = re.compile(r"^(Gloo \w+ failed with )?\[[^\]]*gloo/[^\]]*:\d+\]")


class Watchdog:
    """One rank's watchdog: a ``StepObserver`` that knows what this rank does, and can say what the others did last.

    Args:
        rank: Global rank.
        world_size: Without other ranks there is no thread and nothing to say.
        ranks: Global ranks that this one may wait for; they are listed in explanations, the others counted.
        limit_s: The process groups' time limit.
        where: Description of this rank's place for messages, "" for none.
        store: A connection to a store for this object alone; None: nothing is published.
        reports: Write to stderr when this rank has been in one action for 90 % of the limit.
        interval_s: Time between publications; None: a second, more in worlds of over a thousand ranks, less for short limits.

    Attributes:
        closed: Whether ``close`` was called.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        ranks: Sequence[int],
        limit_s: float,
        where: str = "",
        store: Any = None,
        reports: bool = False,
        interval_s: float | None = None,
    ) -> None:
        self._rank, self._world_size, self._limit_s, self._where = rank, world_size, limit_s, where
        self._ranks = sorted({rank, *ranks})
        self._interval_s = interval_s or max(min(1.0, limit_s / 10), world_size / _RANKS_PER_SECOND)
        self._progress = LiveStatus()
        self._action: Action | None = None
        self._reported = 0.0
        self.closed = False
        self._bulletin: Bulletin | None = None
        if world_size > 1 and store is not None:
            self._bulletin = Bulletin(
                store,
                rank=rank,
                progress=self._progress,
                interval_s=self._interval_s,
                each_time=_weakly(self._look) if reports else None,
            )

    @classmethod
    def create(cls, *, mesh: ProcessMesh, limit_s: float) -> Watchdog:
        """The watchdog of this rank of ``mesh``; the default process group must exist if there is another rank.

        Where the store cannot be connected to once more (a kind of the user's own), what other ranks do is not known.
        """
        world_size, store, reports = mesh.layout.world_size, None, False
        if world_size > 1:
            with contextlib.suppress(RuntimeError):
                store = default_store().clone()
            reports = dist.get_backend() != "gloo"
        ranks = set(range(world_size))
        if world_size > _ALL_WATCHED:
            ranks = {rank for axis in ("model", "replica_sum") for rank in mesh.groups[axis].ranks}
        return cls(
            rank=mesh.rank,
            world_size=world_size,
            ranks=sorted(ranks),
            limit_s=limit_s,
            where=str(mesh.coordinates),
            store=store,
            reports=reports,
        )

    # ---- what is told to it -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Around everything that a rank does in a step: ``what`` is such as "step 12". May be nested.

        Raises:
            PeerError: For an error of torch's communication inside, a collective for example. Other errors pass as they are. All of
                them are published, so that ranks which miss this one can say why.
        """
        progress = self._progress
        outer, action = progress.during, self._action
        progress.during, progress.latest, progress.failure, progress.raised_at = what, what, "", ""
        progress.set("")
        self._action = None
        try:
            yield
        except BaseException as error:
            if not progress.failure:
                # Before it is explained, which takes a moment: the others may be about to ask.
                self._note_failure(error)
            if not is_communication_error(error):
                raise
            place = progress.status().place()
            raise PeerError(f"{self._name} lost another rank ({place}): {error}\n{self.explain()}".rstrip()) from error
        progress.during, self._action = outer, action
        if action is None:
            progress.set("")
        else:
            progress.set("in", action)

    def began(self, schedule: Schedule) -> None:
        """Nothing to note: ``during`` says more."""

    def started(self, action: Action) -> None:
        """Note it."""
        self._action = action
        self._progress.set("in", action)

    def waiting(self, what: str, peer: int | None) -> None:
        """Note it."""
        if peer is not None:
            self._progress.set("waits in", what, peer)
        elif self._action is not None:
            self._progress.set("in", self._action)
        else:
            self._progress.set("after", what)

    def finished(self, action: Action) -> None:
        """Note it."""
        self._action = None
        self._progress.set("after", action)

    def reducing(self, stage: int | None, work: Any) -> None:
        """Nothing to note: a reduction runs beside the actions."""

    def ended(self) -> None:
        """Nothing to note."""

    # ---- what it tells ------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What each rank did last, a line each; "" without other ranks. Takes two seconds at most and never raises."""
        if self._world_size == 1:
            return ""
        others = [rank for rank in self._ranks if rank != self._rank]
        found, answered = ({}, True) if self._bulletin is None else self._bulletin.read(others, _ANSWER_LIMIT_S)
        silent = self._interval_s * _SILENT_INTERVALS
        lines = {rank: found[rank].sentence(silent_after_s=silent) for rank in found}
        if answered and self._bulletin is not None:
            lines |= {rank: "has told nothing yet" for rank in others if rank not in found}
        lines[self._rank] = replace(self._progress.status(), failure="").sentence(silent_after_s=silent, own=True)
        shown = sorted([self._rank, *_suspects(lines.keys() - {self._rank}, found)])
        text = ["What each rank did last:", *(f"  rank {rank}: {lines[rank]}" for rank in shown)]
        if not answered:
            text.append(
                "  rank 0, which keeps the store where ranks tell what they do (or torchrun does), does not answer: what the others "
                "did last is not known"
            )
        elif len(shown) < self._world_size:
            text.append(f"  … and {self._world_size - len(shown)} other ranks")
        causes = {rank: found[rank] for rank in sorted(found) if found[rank].failure not in ("", _LOST)}
        text += [f"The cause is on rank {rank}: {causes[rank].failure} ({causes[rank].raised_at})" for rank in list(causes)[:1]]
        return "\n".join(text)

    def annotate(self, error: BaseException) -> None:
        """Tell the others of an error that did not pass through ``during``; add what each rank did last to one of torch's
        communication."""
        if not self._progress.failure:
            self._note_failure(error)
        if is_communication_error(error):
            error.add_note(self.explain())

    def publish(self) -> bool:
        """Tell the others now what this rank is doing; whether the store took it within a second."""
        return self._bulletin is not None and self._bulletin.publish(_PUBLISH_LIMIT_S)

    @property
    def failed(self) -> bool:
        """Whether the last thing that this rank was busy with ended with an error."""
        return bool(self._progress.failure)

    def all_come(self, topic: str, *, limit_s: float) -> bool:
        """Whether all ranks ask this under the same ``topic``, which is used once, within ``limit_s``; all that ask get one answer, and
        those that cannot tell are told no."""
        if self._world_size == 1:
            return True
        return self._bulletin is not None and self._bulletin.all_come(topic, self._world_size, limit_s)

    def close(self) -> None:
        """End the thread; call it before the process group is destroyed. Does nothing the second time.

        Errors are still explained afterwards, but of the other ranks nothing is known.
        """
        self.closed = True
        if self._bulletin is not None:
            self._bulletin.close()
            self._bulletin = None

    def _note_failure(self, error: BaseException) -> None:
        self._progress.failure, self._progress.raised_at = _summary(error), _place(error)
        self.publish()

    @property
    def _name(self) -> str:
        return f"rank {self._rank} ({self._where})" if self._where else f"rank {self._rank}"

    def _look(self) -> None:
        """On the background thread: report once where this rank is stuck."""
        since = self._progress.note[3]
        stuck, at_work = time.monotonic() - since, self._progress.during and not self._progress.failure
        if at_work and stuck > _REPORT_AT * self._limit_s and self._reported != since:
            self._reported = since
            text = f"{self._name} does not get on: {self._progress.status().place()} since {duration(stuck)}, limit"
            print(f"{text} {duration(self._limit_s)}.\n{self.explain()}", file=sys.stderr, flush=True)


def _suspects(ranks: Iterable[int], found: Mapping[int, RankStatus]) -> list[int]:
    """The ranks to name where there are too many: those that told nothing, failed, or have been at the same thing the longest."""

    def suspicion(rank: int) -> tuple[bool, bool, float]:
        status = found.get(rank)
        return (True, True, 0.0) if status is None else (False, bool(status.failure), status.age_s - status.written)

    return sorted(ranks, key=suspicion, reverse=True)[: _MOST_LINES - 1]


def _summary(error: BaseException) -> str:
    """What to tell others of an error; of a lost rank nothing more, since the place says which one."""
    if isinstance(error, PeerError) or is_communication_error(error):
        return _LOST
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"


def _place(error: BaseException) -> str:
    """Where it was raised: the innermost line that is not of an installed package or of this one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(_PACKAGE)]
    return "".join(f"{os.path.basename(frame.filename)}, line {frame.lineno}" for frame in (own or frames)[-1:])


def is_communication_error(error: BaseException) -> bool:
    """Whether torch's communication failed: an error class of its own, except that gloo's errors are told by their text alone."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _GLOO_ERROR.match(str(error)) is not None)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Call ``method`` for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
