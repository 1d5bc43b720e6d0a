"""Drawings of timelines in the style of arXiv 2104.04473, figure 4.

The command ``ptdp timeline`` uses them. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lightning_ptdp.schedule.actions import ActionKind
from lightning_ptdp.schedule.spans import KIND_NAMES, Number, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


Color = tuple[float, float, float]
_Pair: TypeAlias = "tuple[Axes, Axes | None]"
"""Axes of a timeline and of its memory."""

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
_GAP_INCHES = 0.06
_CURVE_INCHES = 0.79
_TITLE_INCHES = 0.36
_FOOT_INCHES = 0.5
_LEFT_INCHES = 0.62
_RIGHT_INCHES = 0.12


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
    figure, all_axes = _figure(timelines, width, memory)
    end = max(float(timeline.step_time) for timeline in timelines) or 1.0
    points = (width / _DPI - _LEFT_INCHES - _RIGHT_INCHES) * 72 / end
    for index, timeline in enumerate(timelines):
        axes, curve = all_axes[index]
        _draw_ranks(axes, timeline, points)
        axes.set_title(
            titles[index] if titles else timeline.schedule.name,
            fontsize=9,
            loc="left",
            pad=4,
            fontweight="bold",
        )
        axes.set_title(_summary(timeline, measured=measured), fontsize=8, loc="right", pad=4)
        if curve is not None:
            _draw_memory(curve, timeline)
        for plot in (axes, curve) if curve is not None else (axes,):
            plot.set_xlim(0, end)
    _finish(figure, all_axes, timelines, measured=measured)
    _write(figure, path)


def _summary(timeline: Timeline, *, measured: bool) -> str:
    """Return one line: sizes, step time, bubble and the most activations that a rank holds."""
    schedule = timeline.schedule
    v = timeline.schedule.virtual_pipeline_size
    time = (
        f"{float(timeline.step_time) * 1e3:.1f} ms"
        if measured
        else f"{float(timeline.step_time):g}"
    )
    bubble = float(timeline.bubble_fraction) * 100
    parts = (
        f"p = {schedule.pipeline_parallel_size}, v = {v}, m = {schedule.num_microbatches}",
        f"step {time}",
        f"bubble {bubble:.3g} %" if bubble < 100 else f"bubble {bubble:.0f} %",
        f"at most {max(timeline.peak_in_flight, default=0) / v:g} microbatches held",
    )
    return "   ·   ".join(parts)


def _figure(timelines: Sequence[Timeline], width: int, memory: bool) -> tuple[Figure, list[_Pair]]:
    """Return a figure with axes for each timeline, and for its memory if requested.

    The axes are placed by hand, in inches.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing a timeline needs matplotlib. Run: pip install matplotlib", name=error.name
        ) from error
    memory_rows = (_GAP_INCHES, _CURVE_INCHES) if memory else ()
    parts = [
        (_TITLE_INCHES, max(len(timeline.spans), 1) * _ROW_INCHES, *memory_rows)
        for timeline in timelines
    ]
    heights = [*itertools.chain(*parts), _FOOT_INCHES]
    width_inches = width / _DPI
    figure = Figure(figsize=(width_inches, sum(heights)), dpi=_DPI)
    left = _LEFT_INCHES / width_inches
    right = 1 - _RIGHT_INCHES / width_inches
    grid = figure.add_gridspec(
        len(heights), height_ratios=heights, left=left, right=right, bottom=0, top=1, hspace=0
    )
    first = range(1, len(heights) - 1, len(parts[0]))
    return figure, [
        (figure.add_subplot(grid[i]), figure.add_subplot(grid[i + 2]) if memory else None)
        for i in first
    ]


def _draw_ranks(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw the rows of one timeline; ``points`` is the typographic points per unit of time."""
    ranks = len(timeline.spans)
    for rank, spans in enumerate(timeline.spans):
        axes.broken_barh([(0, float(timeline.step_time))], (rank - 0.46, 0.92), facecolors=_IDLE)
        low = rank - 0.46
        height = 0.92
        if timeline.reductions:
            height = 0.74
            _draw_boxes(
                axes, timeline, timeline.reductions[rank], (low + height, 0.92 - height), None
            )
        _draw_boxes(axes, timeline, spans, (low, height), points)
    axes.set_ylim(max(ranks, 1) - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)


def _draw_boxes(
    axes: Axes,
    timeline: Timeline,
    spans: Sequence[Span],
    place: tuple[float, float],
    points: float | None,
) -> None:
    """Draw boxes between the heights (low, low + height).

    Boxes are numbered if ``points`` is given and they are large enough.
    """
    origin = float(timeline.origin)
    boxes = [(float(span.start) - origin, float(span.end - span.start)) for span in spans]
    colors = [_color(timeline, span.action.kind, span.action.stage) for span in spans]
    shortest = min((length for _, length in boxes if length), default=0.0) * (points or 1e9)
    axes.broken_barh(
        boxes, place, facecolors=colors, edgecolors="white", linewidth=min(0.7, shortest / 8)
    )
    # The longest number must fit, so that boxes of one size are all numbered or all empty. A digit
    # is 0.64 of the font size wide.
    digits = len(str(timeline.schedule.num_microbatches - 1))
    for span, (start, length), color in zip(spans, boxes, colors, strict=True) if points else ():
        font = min(8.0, 0.9 * length * (points or 0) / (0.64 * digits))
        if font >= 4.5:
            ink = "white" if sum(color) < 1.6 else "black"
            label = str(span.action.microbatch)
            middle = place[0] + place[1] / 2
            axes.text(
                start + length / 2,
                middle,
                label,
                ha="center",
                va="center_baseline",
                fontsize=font,
                color=ink,
            )


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    """Draw one line per rank, the first dark.

    The line shows the held activations in microbatches through all stages of the rank.
    """
    v = timeline.schedule.virtual_pipeline_size
    origin = float(timeline.origin)
    curves = timeline.memory()
    for rank, curve in enumerate(curves):
        # Of several points at one time, the last one counts: an activation that ends is released
        # when the next begins.
        points = {0.0: 0.0} | {float(time) - origin: float(held) / v for time, held in curve.points}
        color = _mixed(_RANK_COLORS, rank / max(len(curves) - 1, 1))
        axes.step(list(points), list(points.values()), where="post", color=color, linewidth=1.0)
        if rank in (0, len(curves) - 1):
            place = (0.995, 0.93 if rank == 0 else 0.72)
            axes.text(
                *place,
                f"rank {rank}",
                color=color,
                fontsize=7,
                ha="right",
                va="top",
                transform=axes.transAxes,
            )
    axes.set_ylim(0, max((float(curve.peak) for curve in curves), default=0) / v * 1.1 or 1)
    axes.locator_params(axis="y", nbins=4, integer=True)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylabel("held", fontsize=8)


def _finish(
    figure: Figure, all_axes: Sequence[_Pair], timelines: Sequence[Timeline], *, measured: bool
) -> None:
    """Draw the time axis at the bottom and the legend under it, and remove all other axes."""
    flat = [axes for pair in all_axes for axes in pair if axes is not None]
    for axes in flat:
        axes.tick_params(length=0, pad=3)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_xticks([]) if axes is not flat[-1] else None
    last = flat[-1]
    last.tick_params(axis="x", length=2.5, labelsize=7)
    if measured:
        last.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    height = figure.get_figheight()
    figure.text(
        1 - _RIGHT_INCHES / figure.get_figwidth(),
        0.09 / height,
        "time, ms" if measured else "time",
        ha="right",
        fontsize=8,
    )
    figure.legend(
        handles=_legend(timelines),
        loc="lower left",
        bbox_to_anchor=(_LEFT_INCHES / figure.get_figwidth(), 0.02 / height),
        borderaxespad=0,
        ncols=9,
        fontsize=8,
        frameon=False,
        columnspacing=1.2,
        handlelength=1.4,
        handletextpad=0.5,
    )


def _write(figure: Figure, path: str | Path) -> None:
    """Write the picture with a palette: a third of the size, without a visible difference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # a dependency of matplotlib

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert(
        "RGB"
    )
    picture.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        path, format="PNG", optimize=True
    )


def _legend(timelines: Sequence[Timeline]) -> list[Patch]:
    from matplotlib.patches import Patch

    kinds = {
        span.action.kind for t in timelines for spans in (*t.spans, *t.reductions) for span in spans
    }
    chunked = any(timeline.schedule.virtual_pipeline_size > 1 for timeline in timelines)
    handles = [
        Patch(facecolor=_COLORS[kind][0], label=name)
        for kind, name in KIND_NAMES.items()
        if kind in kinds
    ]
    if chunked:
        handles.append(Patch(facecolor=_COLORS[ActionKind.FORWARD][1], label="light: last chunk"))
    return [*handles, Patch(facecolor=_IDLE, label="idle")]


def _color(timeline: Timeline, kind: ActionKind, stage: int) -> Color:
    schedule = timeline.schedule
    stages = schedule.stages_of(schedule.rank_of(stage))
    return _mixed(_COLORS[kind], stages.index(stage) / max(len(stages) - 1, 1))


def _mixed(ends: tuple[Color, Color], share: Number) -> Color:
    red, green, blue = (
        first + (last - first) * float(share) for first, last in zip(*ends, strict=True)
    )
    return red, green, blue
