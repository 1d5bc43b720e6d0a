"""Timelines as drawings in the style of arXiv 2104.04473, figure 4, and as traces.

The command ``ptdp timeline`` uses them. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ptdp.schedule.actions import ActionKind
from lightning_ptdp.schedule.simulate import Number, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch


Color = tuple[float, float, float]

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradient",
    ActionKind.REDUCE: "gradient reduction",
}

# Colours of the first and the last chunk of a rank (red, green, blue). The chunks between get mixed
# colours.
_COLORS: dict[ActionKind, tuple[Color, Color]] = {
    ActionKind.FORWARD: ((0.13, 0.36, 0.66), (0.66, 0.81, 0.94)),
    ActionKind.BACKWARD: ((0.13, 0.50, 0.26), (0.68, 0.87, 0.68)),
    ActionKind.WEIGHT: ((0.80, 0.50, 0.05), (0.98, 0.84, 0.50)),
    ActionKind.REDUCE: ((0.47, 0.27, 0.58), (0.76, 0.63, 0.83)),
}
_IDLE: Color = (0.93, 0.93, 0.93)
_RANK_COLORS: tuple[Color, Color] = ((0.12, 0.12, 0.35), (0.93, 0.55, 0.25))
_DPI = 160
_ROW_INCHES = 0.3
_CURVE_INCHES = 0.8
_TITLE_INCHES = 0.35
_FOOT_INCHES = 0.6
_AXIS_SHARE = 0.93
"""Share of the width that the time axis takes; the names of the ranks take the rest."""
_BOX_HEIGHT = 0.92
_LANE_HEIGHT = 0.18


def draw_timelines(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    titles: Sequence[str] = (),
    width: int = 1600,
    memory: bool = False,
    measured: bool = False,
) -> None:
    """Write a PNG of timelines above each other on one time axis.

    A row is a rank. A box is a computation with the number of its microbatch. The colours of the
    chunks go from dark to light. Reductions are a thin lane under the boxes of their rank.

    Args:
        timelines: Simulated or measured timelines; at least one.
        path: The file to write.
        titles: One title per timeline; by default the names of the schedules.
        width: Width in pixels.
        memory: Also draw the activations that each rank holds, in microbatches through all stages
            of a rank.
        measured: Times are seconds, and shown as milliseconds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing a timeline needs matplotlib. Run: pip install matplotlib", name=error.name
        ) from error
    heights: list[float] = []
    for timeline in timelines:
        heights.append(_TITLE_INCHES + max(len(timeline.spans), 1) * _ROW_INCHES)
        if memory:
            heights.append(_CURVE_INCHES)
    inches = (width / _DPI, sum(heights) + _FOOT_INCHES)
    figure = Figure(figsize=inches, dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    all_axes: list[Axes] = list(grid[:, 0])
    for axes in all_axes:
        axes.tick_params(length=0, labelsize=7)
        axes.spines[:].set_visible(False)
    end = max(float(timeline.step_time) for timeline in timelines) or 1.0
    points = _AXIS_SHARE * inches[0] * 72 / end
    rows = all_axes[::2] if memory else all_axes
    for index, (axes, timeline) in enumerate(zip(rows, timelines, strict=True)):
        _draw_ranks(axes, timeline, points)
        title = titles[index] if titles else timeline.schedule.name
        axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
        axes.set_title(_summary(timeline, measured=measured), fontsize=8, loc="right")
    if memory:
        for axes, timeline in zip(all_axes[1::2], timelines, strict=True):
            _draw_memory(axes, timeline)
    last = all_axes[-1]
    last.set_xlim(0, end)
    last.set_xlabel("time, ms" if measured else "time", fontsize=8, loc="right")
    if measured:
        last.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    figure.legend(
        handles=_legend(timelines), loc="outside lower left", ncols=9, fontsize=8, frameon=False
    )
    figure.savefig(path, format="png")


def _summary(timeline: Timeline, *, measured: bool) -> str:
    """Return one line: sizes, step time, bubble and the most activations that a rank holds."""
    schedule = timeline.schedule
    v = schedule.virtual_pipeline_size
    seconds = float(timeline.step_time)
    time = f"{seconds * 1e3:.1f} ms" if measured else f"{seconds:g}"
    bubble = float(timeline.bubble_fraction) * 100
    parts = (
        f"p = {schedule.pipeline_parallel_size}, v = {v}, m = {schedule.num_microbatches}",
        f"step {time}",
        f"bubble {bubble:.3g} %" if bubble < 100 else f"bubble {bubble:.0f} %",
        f"at most {max(timeline.peak_in_flight, default=0) / v:g} microbatches held",
    )
    return "   ·   ".join(parts)


def _draw_ranks(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw the rows of one timeline; ``points`` is the typographic points per unit of time."""
    ranks = len(timeline.spans)
    digits = len(str(timeline.schedule.num_microbatches - 1))
    for rank, spans in enumerate(timeline.spans):
        low = rank - _BOX_HEIGHT / 2
        height = _BOX_HEIGHT
        axes.broken_barh([(0, float(timeline.step_time))], (low, height), facecolors=_IDLE)
        if timeline.reductions:
            height -= _LANE_HEIGHT
            lane = (low + height, _LANE_HEIGHT)
            _draw_boxes(axes, timeline, timeline.reductions[rank], lane, edge=0.7)
        lengths = [float(span.end - span.start) * points for span in spans]
        shortest = min((length for length in lengths if length), default=0.0)
        _draw_boxes(axes, timeline, spans, (low, height), edge=min(0.7, shortest / 8))
        for span, length in zip(spans, lengths, strict=True):
            # The longest number must fit, so that boxes of one size are all numbered or all empty.
            # A digit is 0.64 of the font size wide.
            font = min(8.0, 0.9 * length / (0.64 * digits))
            if font >= 4.5:
                middle = float(span.start + span.end) / 2 - float(timeline.origin)
                axes.text(
                    middle,
                    low + height / 2,
                    str(span.action.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=font,
                    color="white" if sum(_color(timeline, span)) < 1.6 else "black",
                )
    axes.set_ylim(max(ranks, 1) - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)


def _draw_boxes(
    axes: Axes, timeline: Timeline, spans: Sequence[Span], place: tuple[float, float], edge: float
) -> None:
    """Draw boxes between the heights (low, low + height), with white edges."""
    origin = float(timeline.origin)
    boxes = [(float(span.start) - origin, float(span.end - span.start)) for span in spans]
    colors = [_color(timeline, span) for span in spans]
    axes.broken_barh(boxes, place, facecolors=colors, edgecolors="white", linewidth=edge)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    """Draw one line per rank, the first dark.

    The line shows the held activations in microbatches through all stages of the rank.
    """
    v = timeline.schedule.virtual_pipeline_size
    origin = float(timeline.origin)
    curves = timeline.memory()
    last = len(curves) - 1
    for rank, curve in enumerate(curves):
        # Of several points at one time, the last one counts: an activation that ends is released
        # when the next begins.
        points = {0.0: 0.0} | {float(time) - origin: float(held) / v for time, held in curve.points}
        color = _mixed(_RANK_COLORS, rank / max(last, 1))
        label = f"rank {rank}" if rank in (0, last) else None
        axes.step(
            list(points), list(points.values()), where="post", color=color, linewidth=1, label=label
        )
    axes.set_ylim(0, max((float(curve.peak) for curve in curves), default=0) / v * 1.1 or 1)
    axes.locator_params(axis="y", nbins=4, integer=True)
    axes.set_ylabel("held", fontsize=8)
    axes.legend(loc="upper right", fontsize=7, frameon=False)


def _legend(timelines: Sequence[Timeline]) -> list[Patch]:
    from matplotlib.patches import Patch

    kinds = {
        span.action.kind for t in timelines for spans in (*t.spans, *t.reductions) for span in spans
    }
    handles = [
        Patch(facecolor=_COLORS[kind][0], label=name)
        for kind, name in KIND_NAMES.items()
        if kind in kinds
    ]
    if any(timeline.schedule.virtual_pipeline_size > 1 for timeline in timelines):
        handles.append(Patch(facecolor=_COLORS[ActionKind.FORWARD][1], label="light: last chunk"))
    return [*handles, Patch(facecolor=_IDLE, label="idle")]


def _color(timeline: Timeline, span: Span) -> Color:
    schedule = timeline.schedule
    stage = span.action.stage
    stages = schedule.stages_of(schedule.rank_of(stage))
    return _mixed(_COLORS[span.action.kind], stages.index(stage) / max(len(stages) - 1, 1))


def _mixed(ends: tuple[Color, Color], share: Number) -> Color:
    red, green, blue = (
        first + (last - first) * float(share) for first, last in zip(*ends, strict=True)
    )
    return red, green, blue


# ---- Traces for https://ui.perfetto.dev or chrome://tracing --------------------------------------


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


def _name(event: str, name: str, pid: int, *, tid: int = 0) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


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
