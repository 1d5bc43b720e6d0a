"""Export of timelines as a trace for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_ptdp.schedule.actions import ActionKind
from lightning_ptdp.schedule.spans import Span, Timeline

__all__ = ["KIND_NAMES", "chrome_trace"]

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradient",
    ActionKind.REDUCE: "gradient reduction",
}


def chrome_trace(*timelines: Timeline, titles: Sequence[str] = ()) -> dict[str, Any]:
    """Return timelines in the Trace Event Format, to be written as JSON.

    Times are interpreted as seconds. Every timeline is a process of the trace and every rank a
    thread. A rank with reductions has a second thread. The activations that a rank holds are a
    counter.

    Args:
        timelines: Simulated or measured timelines.
        titles: Names of the processes; by default the schedules.
    """
    titles = titles or [timeline.schedule.describe() for timeline in timelines]
    events = [
        event
        for pid, timeline in enumerate(timelines)
        for event in _events(timeline, pid, titles[pid])
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline, pid: int, title: str) -> Iterator[dict[str, Any]]:
    yield _name("process_name", title, pid)
    for rank, spans in enumerate(timeline.spans):
        yield _name("thread_name", f"pipeline rank {rank}", pid, tid=2 * rank)
        yield from (_complete(span, pid, 2 * rank) for span in spans)
    for rank, spans in enumerate(timeline.reductions):
        yield _name("thread_name", f"pipeline rank {rank}: reductions", pid, tid=2 * rank + 1)
        yield from (_complete(span, pid, 2 * rank + 1) for span in spans)
    for rank, curve in enumerate(timeline.memory()):
        name = f"activations held by rank {rank}"
        yield from (
            {
                "name": name,
                "ph": "C",
                "ts": float(time) * 1e6,
                "pid": pid,
                "args": {"held": float(held)},
            }
            for time, held in curve.points
        )


def _name(what: str, name: str, pid: int, *, tid: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": str(span.action),
        "cat": KIND_NAMES[span.action.kind],
        "ph": "X",
        "ts": float(span.start) * 1e6,
        "dur": float(span.end - span.start) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }
