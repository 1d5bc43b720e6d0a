"""Time and memory of the best layouts as bars, in the terminal and as a picture.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptdp.planner.job import Job
from lightning_ptdp.planner.search import Candidate, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_WIDTH = 60
_BAR_INCHES = 0.25
_GIB = 2**30


def bars(plan: Plan) -> str:
    """Return two bars for each of the five best layouts, with one letter per part.

    One bar compares its step with the slowest of these layouts. The second compares its memory with
    the usable memory.
    """
    times = [row.time.parts for row in plan.best[:5]]
    memories = [row.memory.parts for row in plan.best[:5]]
    slowest = max(sum(parts.values()) for parts in times)
    lines = [_legend("time", times)]
    for i, parts in enumerate(times, 1):
        lines.append(f"  {i}  {_bar(parts, slowest):{_WIDTH}}  {sum(parts.values()):.3g} s")
    lines.append(_legend("memory", memories) + (", | reserve" if plan.job.reserve else ""))
    for i, parts in enumerate(memories, 1):
        gib = sum(parts.values()) / _GIB
        lines.append(f"  {i}  {_memory_bar(parts, plan.job)}  {gib:.3g} GiB")
    return "\n".join(lines)


def draw(plan: Plan, path: Path) -> None:
    """Draw the same bars of the eight best layouts as a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = plan.best[:8]
    figure = Figure(figsize=(10, 1.5 + 0.7 * len(shown)), layout="constrained")
    time_axes, memory_axes = figure.subplots(2, 1)
    _draw_bars(time_axes, shown, [row.time.parts for row in shown], unit=1)
    time_axes.set(title="time of a step", xlabel="s")
    _draw_bars(memory_axes, shown, [row.memory.parts for row in shown], unit=_GIB)
    memory_axes.set(title="memory of the fullest rank", xlabel="GiB")
    limit = plan.job.limit_bytes / _GIB
    usable = plan.job.device.usable_bytes / _GIB
    if plan.job.reserve:
        memory_axes.axvline(limit, color="black", linestyle="--", label=f"limit {limit:.3g}")
    memory_axes.axvline(usable, color="black", label=f"usable {usable:.3g}")
    memory_axes.set_xlim(0, 1.02 * usable)
    for axes in (time_axes, memory_axes):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def _draw_bars(
    axes: Axes, shown: Sequence[Candidate], rows: Sequence[Mapping[str, float]], *, unit: float
) -> None:
    """Draw a bar for each layout, the first at the top, with a colour per part."""
    names = [f"{i}  {candidate.choice.describe()}" for i, candidate in enumerate(shown, 1)]
    left = [0.0] * len(shown)
    for part in _named(rows):
        lengths = [row[part] / unit for row in rows]
        axes.barh(names, lengths, left=left, label=part)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.invert_yaxis()


def draw_what_if(
    found: Mapping[int, Sequence[tuple[int, Candidate]]], path: Path, *, tokens: Mapping[int, int]
) -> None:
    """Draw the tokens per second for each number of devices, one bar per batch.

    Args:
        found: For each batch, (devices, best layout).
        path: File of the picture.
        tokens: Tokens of a step, for each batch.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    worlds = sorted({world for points in found.values() for world, _ in points})
    width = 1 / (len(found) + 1)
    figure = Figure(
        figsize=(max(8.0, 2 + _BAR_INCHES * len(worlds) * (len(found) + 1)), 5),
        layout="constrained",
    )
    axes = figure.subplots()
    for i, (batch, points) in enumerate(found.items()):
        positions = [worlds.index(world) + i * width for world, _ in points]
        rates = [tokens[batch] / candidate.time.total for _, candidate in points]
        axes.bar(positions, rates, width, label=f"batch {batch}", alpha=0.6)
        # Each label starts at the foot of its own bar and is vertical, so that labels do not
        # overlap.
        for position, (_, candidate) in zip(positions, points, strict=True):
            label = f" {candidate.choice.describe_layout()}"
            axes.text(position, 0, label, rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(
        [i + (len(found) - 1) * width / 2 for i in range(len(worlds))],
        [str(world) for world in worlds],
    )
    axes.set(xlabel="devices", ylabel="tokens/s")
    figure.legend(loc="outside upper center", ncols=6)
    figure.savefig(path)


def _named(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the parts that are not 0 in every row."""
    return [part for part in rows[0] if any(row[part] for row in rows)]


def _legend(title: str, rows: Sequence[Mapping[str, float]]) -> str:
    return f"{title}: " + ", ".join(f"{_letter(name)} {name}" for name in _named(rows))


def _letter(name: str) -> str:
    return name[0] if name != "working" else "k"


def _bar(parts: Mapping[str, float], total: float) -> str:
    """Return a bar with a letter per column.

    The ends of the parts are rounded, not their lengths, so that the bar has the right
    length.
    """
    text = ""
    end = 0.0
    for name, value in parts.items():
        end += value
        text += _letter(name) * (round(_WIDTH * end / total) - len(text))
    return text


def _memory_bar(parts: Mapping[str, float], job: Job) -> str:
    """Return a bar over all usable memory, with a mark where the reserve begins."""
    bar = _bar(parts, job.device.usable_bytes)
    limit = round(_WIDTH * (1 - job.reserve))
    return f"{bar:{limit}}|".ljust(_WIDTH) if job.reserve else f"{bar:{_WIDTH}}"
