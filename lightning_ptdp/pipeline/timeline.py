"""Draw a timeline: as a picture in the style of arXiv 2104.04473, figure 4, or as a trace for https://ui.perfetto.dev.

    python -m lightning_ptdp.pipeline.timeline --pp 4 --vpp 2 --microbatches 8 --schedule interleaved_1f1b --output timeline.png

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ptdp.pipeline.actions import ActionKind
from lightning_ptdp.pipeline.schedules import SCHEDULES, build_schedule
from lightning_ptdp.pipeline.simulate import Costs, Span, Timeline, simulate

__all__ = ["chrome_trace", "draw_timeline", "main"]

# The colours of the first and the last chunk of a rank, red green blue; the chunks between are mixed.
_COLORS = {
    ActionKind.FORWARD: ((0.13, 0.36, 0.66), (0.66, 0.81, 0.94)),
    ActionKind.BACKWARD: ((0.13, 0.50, 0.26), (0.68, 0.87, 0.68)),
    ActionKind.WEIGHT: ((0.55, 0.42, 0.08), (0.95, 0.86, 0.60)),
}
_WORDS = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.WEIGHT: "weight gradient"}


def draw_timeline(timeline: Timeline, path: str | Path, *, width: int = 1600) -> None:
    """Write a PNG: one row a rank, a box a computation with the number of its microbatch, chunks from dark to light.

    Args:
        timeline: Simulated or measured.
        path: The file to write.
        width: In pixels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dots_per_inch = 160
    ranks = len(timeline.spans)
    figure = Figure(figsize=(width / dots_per_inch, 1.15 + 0.42 * ranks), dpi=dots_per_inch, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    origin = min((spans[0].start for spans in timeline.spans if spans), default=0)
    end = float(timeline.step_time)
    points = (width / dots_per_inch * 72 - 50) / (end or 1.0)
    axes.set_facecolor((0.94, 0.94, 0.94))
    for rank, spans in enumerate(timeline.spans):
        _draw_rank(axes, timeline, rank, spans, float(origin), points)
    axes.set_xlim(0, end or 1.0)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlabel("time →", fontsize=9, loc="right")
    axes.set_title(_title(timeline), fontsize=10, loc="left")
    axes.legend(handles=_legend(timeline), loc="upper left", bbox_to_anchor=(0, -0.02), ncols=8, fontsize=8, frameon=False)
    canvas.print_png(str(path))


def _draw_rank(axes: Any, timeline: Timeline, rank: int, spans: Sequence[Span], origin: float, points: float) -> None:
    """The boxes of one rank; ``points`` is the printer's points that a unit of time takes."""
    boxes = [(float(span.start) - origin, float(span.end - span.start)) for span in spans]
    colors = [_color(timeline, span.action.kind, span.action.stage) for span in spans]
    axes.broken_barh(boxes, (rank - 0.46, 0.92), facecolors=colors, edgecolors="white", linewidth=0.8)
    # The longest number must fit, so that boxes of one size are all numbered or all empty; a digit is 0.64 of the font wide.
    digits = len(str(timeline.schedule.num_microbatches - 1))
    for span, (start, length), color in zip(spans, boxes, colors, strict=True):
        font = min(8.0, 0.85 * length * points / (0.64 * digits))
        if font >= 4.5:
            ink = "white" if sum(color) < 1.6 else "black"
            label = str(span.action.microbatch)
            axes.text(start + length / 2, rank, label, ha="center", va="center", fontsize=font, color=ink)


def _color(timeline: Timeline, kind: ActionKind, stage: int) -> tuple[float, ...]:
    schedule = timeline.schedule
    chunk = stage // schedule.pipeline_parallel_size
    lightness = chunk / max(schedule.virtual_pipeline_size - 1, 1)
    return tuple(dark + (light - dark) * lightness for dark, light in zip(*_COLORS[kind], strict=True))


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    p, v, m = schedule.pipeline_parallel_size, schedule.virtual_pipeline_size, schedule.num_microbatches
    bubble = f"bubble {float(timeline.bubble_fraction):.1%} of the ideal time"
    return f"{schedule.name}: {p} ranks, {v} {'chunk' if v == 1 else 'chunks'} a rank, {m} microbatches, {bubble}"


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    v, p = schedule.virtual_pipeline_size, schedule.pipeline_parallel_size
    found = {span.action.kind for spans in timeline.spans for span in spans}
    handles = []
    for kind, word in _WORDS.items():
        for chunk in sorted({0, v - 1}) if kind in found else ():
            label = word if v == 1 else f"{word}, chunk {chunk}"
            handles.append(Patch(facecolor=_color(timeline, kind, chunk * p), label=label))
    return [*handles, Patch(facecolor=(0.94, 0.94, 0.94), label="idle")]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format, to be written as JSON and opened in Perfetto; costs are taken as seconds."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}})
        events += [
            {
                "name": str(span.action),
                "cat": _WORDS[span.action.kind],
                "ph": "X",
                "ts": float(span.start) * 1e6,
                "dur": float(span.end - span.start) * 1e6,
                "pid": 0,
                "tid": rank,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for span in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate a schedule and write its picture (``.png``) or trace (``.json``)."""
    parser = argparse.ArgumentParser(prog="python -m lightning_ptdp.pipeline.timeline", description=main.__doc__)
    parser.add_argument("--pp", type=int, required=True, help="pipeline_parallel_size")
    parser.add_argument("--vpp", type=int, default=1, help="virtual_pipeline_size (default 1)")
    parser.add_argument("--microbatches", type=int, required=True, help="num_microbatches")
    parser.add_argument("--schedule", default="auto", help=f"one of {', '.join(SCHEDULES)} (default auto)")
    parser.add_argument("--forward", type=float, default=1.0, help="duration of a forward of one stage (default 1)")
    parser.add_argument("--backward", type=float, default=2.0, help="duration of a backward of one stage (default 2)")
    parser.add_argument("--latency", type=float, default=0.0, help="duration of a message (default 0)")
    parser.add_argument("--output", type=Path, required=True, help="file to write, ending in .png or .json")
    options = parser.parse_args(arguments)
    if options.output.suffix not in (".png", ".json"):
        parser.error(f"--output {options.output} must end in .png or .json")
    try:
        costs = Costs(forward=options.forward, backward=options.backward, latency=options.latency)
        schedule = build_schedule(
            options.schedule,
            pipeline_parallel_size=options.pp,
            virtual_pipeline_size=options.vpp,
            num_microbatches=options.microbatches,
        )
    except ValueError as error:
        parser.error(str(error))
    timeline = simulate(schedule, costs)
    if options.output.suffix == ".png":
        draw_timeline(timeline, options.output)
    else:
        options.output.write_text(json.dumps(chrome_trace(timeline)))
    print(f"{options.output}: {schedule.describe()}, bubble {float(timeline.bubble_fraction):.1%} of the ideal time")


if __name__ == "__main__":
    main()
