"""Recorder of the measured timeline of a step, gathered on the first pipeline rank.

Each rank notes the start and the end of its computations. The first rank of the pipeline combines
the notes of all ranks.

On the CPU a note is a ``perf_counter_ns``. On CUDA it is an event on the computation's stream, so
that nothing is synchronized inside the step. The events are read after the step. A computation
begins when its message has arrived: the wait for the message is idle time.

Ranks on different machines have clocks with different zeros. After the step, the first rank
exchanges a few round-trip messages with each other rank and uses the fastest one. The other rank is
taken to have read its clock halfway between send and receive. The error is at most half of that
round trip, some 50 µs over TCP (Cristian's method). A barrier and a common zero before the step
would be simpler, but would change the measurement: a rank that enters the step late would look as
if it were on time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.pipeline.program_observers import StepObserver
from lightning_ptdp.schedule.actions import COMPUTE, Action, ActionKind, Schedule
from lightning_ptdp.schedule.simulate import Costs, Number, Span, Timeline, simulate
from lightning_ptdp.world.mesh import Group

_ROUND_TRIPS = 10

Moment = Any
"""A ``perf_counter_ns``, or a CUDA event."""


_Note = tuple[Action, Moment, Moment]
"""An action, its start and its end."""


class ActionRecorder(StepObserver):
    """Step observer that keeps the times of the last program that ran.

    It has no cost unless it is registered as an observer.

    Args:
        device: Device of the computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule: Schedule | None = None
        self._forget()

    def _forget(self) -> None:
        self._ended = False
        self._start: Moment = None
        self._notes: list[_Note] = []
        # New objects each time: a reduction of an earlier program that ends late writes into a
        # discarded list.
        self._reductions: list[_Note] = []

    def began(self, schedule: Schedule) -> None:
        """Discard the notes of the previous program."""
        self._forget()
        self._schedule = schedule

    def started(self, action: Action) -> None:
        """Note the start of a computation or of its wait."""
        if action.kind in COMPUTE:
            self._start = self._now()

    def waiting(self, what: str, peer: int | None) -> None:
        """Restart the computation's clock when its initial wait is over.

        The wait is not part of the computation.
        """
        if peer is None and self._start is not None:
            self._start = self._now()

    def finished(self, action: Action) -> None:
        """Note the end of a computation."""
        if action.kind in COMPUTE:
            self._notes.append((action, self._start, self._now()))
            self._start = None

    def reducing(self, stage: int | None, work: Any) -> None:
        """Note the start of a reduction.

        Its end is noted when ``work.when_done`` calls back.
        """
        if stage is not None:
            notes = self._reductions
            action = Action(ActionKind.REDUCE, stage)
            start = self._now()
            work.when_done(lambda: notes.append((action, start, self._now())))

    def ended(self) -> None:
        """Mark the program as complete."""
        self._ended = True

    def gather(self, group: Group) -> Timeline | None:
        """Gather the times of all pipeline ranks, in seconds after the first computation.

        The call is collective over the pipeline group. Call it after the step, when the step's
        reductions have been waited for.

        Args:
            group: The pipeline group.

        Returns:
            The timeline on the first rank of the group, None on all other ranks. Also None if a
            rank has not recorded a complete program, or has recorded another program than the first
            rank.
        """
        record = self._recorded() if self._ended else None
        parts = [record]
        offsets = [0.0]
        if group.size > 1:
            parts = [None] * group.size
            offsets = _clock_offsets(group, self._device)
            dist.gather_object(
                record, parts if group.rank == 0 else None, dst=group.ranks[0], group=group.handle
            )
        records = [part for part in parts if part is not None]
        if (
            self._schedule is None
            or record is None
            or [part.program for part in records] != [record.program] * group.size
        ):
            return None
        aligned = list(zip(records, offsets, strict=True))
        zero = min(
            (span.start + offset for part, offset in aligned for span in part.spans), default=0.0
        )
        reductions = tuple(_shifted(part.reductions, offset - zero) for part, offset in aligned)
        return Timeline(
            self._schedule,
            tuple(_shifted(part.spans, offset - zero) for part, offset in aligned),
            reductions if any(reductions) else (),
        )

    def _recorded(self) -> _RecordedPart:
        assert self._schedule is not None
        last = None
        if self._device.type == "cuda":
            # The GPU's clock is related to the host's through an event that has just completed.
            last = self._now()
            last.synchronize()
        now = time.perf_counter()
        spans, reductions = (
            [
                Span(action, _seconds(start, last, now), _seconds(end, last, now))
                for action, start, end in notes
            ]
            for notes in (self._notes, self._reductions)
        )
        return _RecordedPart(self._schedule.describe(), tuple(spans), _merged(reductions))

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class _RecordedPart:
    """Record of one rank, in seconds on its own clock."""

    program: str
    spans: tuple[Span, ...]
    reductions: tuple[Span, ...]


def _shifted(spans: Sequence[Span], seconds: Number) -> tuple[Span, ...]:
    """Return the same spans, later by ``seconds``."""
    return tuple(Span(span.action, span.start + seconds, span.end + seconds) for span in spans)


def ideal_timeline(timeline: Timeline) -> Timeline:
    """Simulate the same schedule with the mean measured duration of each computation.

    The mean is taken for each kind of computation on each stage.

    Messages take no time in the simulation. The difference to the measured timeline is therefore
    the cost of communication, of the runtime and of uneven microbatches. A reduction is given the
    time that it took beyond both the last gradient of its stage and the reduction before it,
    because buckets start earlier.
    """
    durations: dict[tuple[ActionKind, int], list[Number]] = defaultdict(list)
    stage_ends: dict[int, Number] = {}
    for spans in timeline.spans:
        for span in spans:
            durations[span.action.kind, span.action.stage].append(span.end - span.start)
            stage_ends[span.action.stage] = span.end
    for spans in timeline.reductions:
        last_end = timeline.origin
        for span in spans:
            start = max(stage_ends[span.action.stage], last_end)
            durations[ActionKind.REDUCE, span.action.stage].append(max(span.end - start, 0))
            last_end = max(span.end, last_end)
    mean = {
        kind: [
            sum(durations[kind, stage]) / max(len(durations[kind, stage]), 1)
            for stage in range(timeline.schedule.num_stages)
        ]
        for kind in (*COMPUTE, ActionKind.REDUCE)
    }
    forward, backward, weight, reduce = mean.values()
    return simulate(
        timeline.schedule, Costs(forward=forward, backward=backward, weight=weight, reduce=reduce)
    )


def _seconds(moment: Moment, last: torch.cuda.Event | None, now: float) -> float:
    """Return a moment in seconds on this rank's ``perf_counter``.

    The time of a CUDA event is ``now`` minus the time elapsed from the event to ``last``, which
    completed at ``now``.
    """
    return moment / 1e9 if last is None else now - moment.elapsed_time(last) / 1e3


def _merged(reductions: Sequence[Span]) -> tuple[Span, ...]:
    """Return one span per stage, from the launch of its first bucket to the end of its last."""
    by_action: dict[Action, list[Span]] = defaultdict(list)
    for span in reductions:
        by_action[span.action].append(span)
    merged = [
        Span(action, min(s.start for s in spans), max(s.end for s in spans))
        for action, spans in by_action.items()
    ]
    return tuple(sorted(merged, key=lambda span: span.start))


def _clock_offsets(group: Group, device: torch.device) -> list[float]:
    """Return the offsets in seconds from each rank's ``perf_counter`` to the first rank's.

    An offset is added to a rank's time. All offsets are zero on ranks other than the first.
    """
    pg_device = device if dist.get_backend(group.handle) == "nccl" else torch.device("cpu")
    offsets = [0.0] * group.size
    for peer in range(1, group.size):
        if group.rank in (0, peer):
            offsets[peer] = min(_round_trip(group, peer, pg_device) for _ in range(_ROUND_TRIPS))[1]
    return offsets


def _round_trip(group: Group, peer: int, device: torch.device) -> tuple[int, float]:
    """Exchange one message between the first rank and ``peer``.

    Returns:
        On the first rank, the duration in nanoseconds and the lead in seconds of its clock over the
        peer's. Zeros on the peer.
    """
    clock = torch.zeros(1, dtype=torch.int64, device=device)
    if group.rank == peer:
        dist.recv(clock, group.ranks[0], group=group.handle)
        clock.item()  # on CUDA: waits until the message has arrived
        clock.fill_(time.perf_counter_ns())
        dist.send(clock, group.ranks[0], group=group.handle)
        return 0, 0.0
    before = time.perf_counter_ns()
    dist.send(clock, group.ranks[peer], group=group.handle)
    dist.recv(clock, group.ranks[peer], group=group.handle)
    peer_time = int(clock.item())
    after = time.perf_counter_ns()
    return after - before, ((before + after) / 2 - peer_time) / 1e9
