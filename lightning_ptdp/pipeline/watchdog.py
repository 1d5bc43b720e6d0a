"""Watchdog of a rank: turns a silent hang into an error that reports all last actions.

Each rank notes its current action and publishes it twice a second (status_board.py), because a
frozen process cannot be asked. The limit is that of the process groups. With gloo, a wait that
takes too long raises. With NCCL, a wait only queues work for the GPU. There a thread decides by
itself that the rank hangs (hang_guard.py), reports it on stderr, aborts the groups and ends the
process; the launcher then ends the other processes. With gloo the thread does that only if the
error does not come.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

import torch.distributed as dist

from lightning_ptdp.pipeline.hang_guard import (
    GuardObservation,
    HangGuard,
    HangJudge,
    Heartbeat,
    abort_groups,
    give_up,
    keep_flight_record,
)
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.pipeline.program_observers import StepObserver
from lightning_ptdp.pipeline.rank_status import (
    LOST,
    LiveStatus,
    RankReport,
    cause_first,
    duration,
    place_of,
)
from lightning_ptdp.pipeline.status_board import StatusBoard
from lightning_ptdp.schedule.actions import Action
from lightning_ptdp.shims.torch_distributed import default_store, is_communication_error
from lightning_ptdp.world.mesh import ProcessMesh

_INTERVAL_S = 0.5
_PUBLISH_LIMIT_S = 1.0
_ANSWER_LIMIT_S = 2.0
_PUBLISHED_WITHIN = 1.5  # intervals in which a live rank publishes a status
_SILENT_INTERVALS = 4
_RANKS_PER_SECOND = 1000  # publications that the store's host should have to accept
# Largest world in which a rank watches all ranks, and not only those of its own groups.
_ALL_WATCHED = 64
OTHER_REPLICAS = "other replicas"
_REPORT_AT = 0.9  # of the limit
_MOST_CHARACTERS = 4000  # of an error, which every rank publishes


@dataclass(kw_only=True, eq=False)
class Watchdog(StepObserver):
    """Watchdog of one rank: tracks this rank's action and reports the other ranks' actions.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks; with one rank there is no thread and nothing to report.
        ranks: Global ranks that this one may wait for. Explanations list them and count the
            remaining ranks.
        limit_s: Time limit of the process groups.
        where: Description of this rank's place for messages, "" for none.
        store: A connection to a store for this object alone; None: nothing is published.
        waits_raise: Whether a wait for another rank raises at the limit, as gloo's do. Otherwise
            the watchdog writes to stderr when this rank has been in one action for 90 % of the
            limit, and ends the process when it hangs.
        interval_s: Time between publications; 0 means half a second, more in worlds of over 500
            ranks, less for short limits.
        closed: Whether ``close`` was called.
        waited: Seconds for which this rank has waited in steps, by what it waited for.
    """

    rank: int
    world_size: int
    ranks: Sequence[int]
    limit_s: float
    where: str = ""
    store: InitVar[dist.Store | None] = None
    waits_raise: bool = True
    interval_s: float = 0.0
    closed: bool = field(default=False, init=False)
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)

    def __post_init__(self, store: dist.Store | None) -> None:
        peers = tuple(sorted({*self.ranks} - {self.rank}))
        self._progress = LiveStatus()
        self._pulse = Heartbeat()
        self._thread = threading.get_ident()
        self._action: Action | None = None
        self._reported = 0.0
        self._is_over = False
        self.interval_s = self.interval_s or max(
            min(_INTERVAL_S, self.limit_s / 10), self.world_size / _RANKS_PER_SECOND
        )
        self._judge = HangJudge(
            limit_s=self.limit_s, interval_s=self.interval_s, waits_raise=self.waits_raise
        )
        self._status_board: StatusBoard | None = None
        self._guard: HangGuard | None = None
        if self.world_size > 1 and store is not None:
            self._status_board = board = StatusBoard(
                store, self.rank, peers, self.world_size, self._progress, self.interval_s
            )
            board.start()
            # The thread holds no reference to this object, and ends with it.
            weakref.finalize(self, board.end).atexit = False
            self._guard = HangGuard(
                partial(Watchdog._look, weakref.proxy(self)), interval_s=self.interval_s
            )

    @classmethod
    def create(
        cls, *, mesh: ProcessMesh, limit_s: float, store: dist.Store | None = None
    ) -> Watchdog:
        """Create the watchdog of this rank of ``mesh``.

        The default process group must exist if there is another rank. ``store`` is a connection for
        the watchdog alone. If it is None, a new connection to the process group's store is opened.
        If that is not possible (a store type of the user's own), the other ranks' actions are not
        known.
        """
        world_size = mesh.layout.world_size
        waits_raise = True
        if world_size > 1:
            if store is None:
                with contextlib.suppress(RuntimeError):
                    store = default_store().clone()
            waits_raise = dist.get_backend() == "gloo"
        ranks = set(range(world_size))
        if world_size > _ALL_WATCHED:
            ranks = {rank for axis in ("model", "replica_sum") for rank in mesh.groups[axis].ranks}
        watchdog = cls(
            rank=mesh.rank,
            world_size=world_size,
            ranks=sorted(ranks),
            limit_s=limit_s,
            where=mesh.where,
            store=store,
            waits_raise=waits_raise,
        )
        if watchdog._status_board is not None:
            # Wait for a first status of every rank, so that even a rank that is lost soon is known.
            # All ranks create the watchdog together, right after the mesh.
            watchdog._status_board.wait_for_all(min(limit_s, _PUBLISH_LIMIT_S))
        return watchdog

    # ---- events ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Wrap everything that a rank does in a step; ``what`` is, for example, "step 12".

        The context may be nested.

        Raises:
            PeerError: An error of torch's communication occurred inside, in a collective for
                example. Any other error is passed on unchanged. All errors are published, so that
                ranks that wait for this one can name the cause.
        """
        progress = self._progress
        outer = progress.during
        action = self._action
        progress.during = what
        progress.latest = what
        if not self._is_over:
            progress.failure = progress.raised_at = ""
        progress.set("")
        self._action = None
        try:
            yield
        except BaseException as error:
            if not progress.failure:
                # Published before the explanation, which takes a moment: other ranks may be about
                # to ask.
                self._note_failure(error)
            if not is_communication_error(error):
                raise
            place = progress.status().place()
            raise PeerError(
                cause_first(f"{self._name} lost another rank ({place}): {error}", self.explain())
            ) from error
        progress.during = outer
        self._action = action
        if action is None:
            progress.set("")
        else:
            progress.set("in", action)

    def started(self, action: Action) -> None:
        """Note the start of ``action``."""
        self._action = action
        self._progress.set("in", action)

    def waiting(self, what: str, peer: int | None) -> None:
        """Note the start or the end of a wait."""
        phase, _, awaited, since = self._progress.note
        if phase == "waits in":
            self.waited[f"rank {awaited}"] += time.monotonic() - since
        if peer is not None:
            self._progress.set("waits in", what, peer)
        elif self._action is not None:
            # If a wait only queues work, the rank may block here.
            self._progress.set(
                "in", self._action, None if self.waits_raise else self._progress.note[2]
            )
        else:
            self._progress.set("after", what)

    @contextlib.contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Count the time in the context as a wait for ``what``."""
        began = time.monotonic()
        yield
        self.waited[what] += time.monotonic() - began

    def finished(self, action: Action) -> None:
        """Note the end of ``action``."""
        self._action = None
        self._progress.set("after", action)

    # ---- reports ---------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return the last action of each rank, one line per rank, for an error about another rank.

        The result is "" without other ranks. The call takes a few seconds at most and never raises.
        It also publishes which ranks do not answer.
        """
        if self.world_size == 1:
            return ""
        if not self._progress.failure:
            self._progress.failure = LOST
            self.publish()
        report = self._account()
        if self._progress.failure == LOST and report.missing:
            self._progress.failure = report.lost()
            if self.publish() and self.rank == 0 and not report.is_known():
                # The store may end with this process: give the other ranks time to read it.
                time.sleep(self.interval_s)
        return report.text()

    def _account(self) -> RankReport:
        silent_after = self.interval_s * _SILENT_INTERVALS
        report = partial(
            RankReport,
            rank=self.rank,
            own=self._progress.status(),
            world_size=self.world_size,
            silent_after_s=silent_after,
        )
        board = self._status_board
        if board is None:
            return report()
        missing = board.silent_ranks(
            min(_PUBLISHED_WITHIN * self.interval_s, _ANSWER_LIMIT_S),
            min(silent_after, _PUBLISH_LIMIT_S),
        )
        heard = dict(board.heard)
        as_of = board.answered_at
        silent = missing
        if silent is None:
            silent = {
                rank
                for rank, last in heard.items()
                if not last.status.is_done and (rank == 0 or as_of - last.at > silent_after)
            }
        return report(
            asked=board.others,
            heard=heard,
            missing=frozenset(silent),
            as_of=as_of,
            store_answers=missing is not None,
        )

    def annotate(self, error: BaseException) -> None:
        """Publish an error that ends the run; it need not have passed through ``during``.

        If the error is one of torch's communication, add each rank's last action to it.
        """
        self._is_over = True
        if not self.waits_raise:
            # Runs before Lightning destroys the groups, which waits for posted receives.
            atexit.register(abort_groups)
        if not self._progress.failure:
            self._note_failure(error)
        if is_communication_error(error):
            error.add_note(self.explain())

    def publish(self) -> bool:
        """Publish this rank's status now.

        Returns:
            True if the store accepted it within a second.
        """
        return self._status_board is not None and self._status_board.exchange(_PUBLISH_LIMIT_S)

    @property
    def failed(self) -> bool:
        """Return True if the last action of this rank ended with an error."""
        return bool(self._progress.failure)

    def all_arrive(self, topic: str, *, limit_s: float) -> bool:
        """Return True if all ranks call this with the same ``topic`` within ``limit_s``.

        A topic is used once. All calling ranks get the same answer. It is False if it cannot be
        determined.
        """
        if self.world_size == 1:
            return True
        return self._status_board is not None and self._status_board.all_arrive(topic, limit_s)

    def close(self) -> None:
        """End the threads; call it before the process group is destroyed.

        A second call does nothing. Errors are still explained afterwards, but the state of the
        other ranks is then unknown.
        """
        self.closed = self._progress.ended = True
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._status_board is not None:
            self._status_board.close()
            self._status_board = None

    def _note_failure(self, error: BaseException) -> None:
        # The place of a lost rank's error names the rank.
        is_lost = isinstance(error, PeerError) or is_communication_error(error)
        text = f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"
        self._progress.failure = LOST if is_lost else text
        self._progress.raised_at = place_of(traceback.extract_tb(error.__traceback__))
        self.publish()

    @property
    def _name(self) -> str:
        return f"rank {self.rank} ({self.where})" if self.where else f"rank {self.rank}"

    # ---- on the guard's thread -------------------------------------------------------------------

    def _look(self) -> bool:
        """Report once where this rank is stuck, and end it if it hangs.

        Returns:
            True if the guard should look again.
        """
        board = self._status_board
        if board is None:
            return False
        progress = self._progress
        now = time.monotonic()
        since = progress.note[3]
        stuck = now - since
        asks = stuck > self.limit_s / 4 and self._thread == threading.main_thread().ident
        observation = GuardObservation(
            now=now,
            note=progress.note,
            watched=bool(progress.during),
            failed=bool(progress.failure),
            heard=dict(board.heard),
            answered_at=board.answered_at,
            unanswered_s=board.unanswered_s,
            pulse=self._pulse.ask() if asks else None,
        )
        at_work = observation.watched and not observation.failed
        if reason := self._judge.look(observation):
            self._end(stuck, reason)
        if (
            not self.waits_raise
            and at_work
            and stuck > _REPORT_AT * self.limit_s
            and self._reported != since
        ):
            self._reported = since
            _say(f"{self._stuck(stuck)}.\n{self._account().text()}{self._recorded()}")
        return True

    def _stuck(self, time_s: float) -> str:
        limit = duration(self.limit_s)
        return (
            f"{self._name} is stuck: {self._progress.status().place()} since {duration(time_s)}, "
            f"limit {limit}"
        )

    def _end(self, stuck: float, reason: str) -> None:
        text = self._stuck(stuck)
        frame = sys._current_frames().get(self._thread)
        place = (
            place_of(traceback.extract_stack(frame)) if frame is not None else "an unknown place"
        )
        del frame
        self._progress.raised_at = self._progress.raised_at or place
        _say(
            f"{text}: {reason}.\n{self.explain()}{self._recorded()}\nThis rank is at {place}. "
            "Its process ends now."
        )
        give_up()

    def _recorded(self) -> str:
        path = "" if self.waits_raise else keep_flight_record(self.rank)
        if path:
            return (
                "\nThe last NCCL operations, recorded by torch's flight recorder (torchfrtrace "
                f"reads the file): {path}"
            )
        return ""


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # one write: other ranks write to stderr too
    sys.stderr.flush()
