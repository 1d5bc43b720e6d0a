"""Time and memory of the best layouts by their parts, as bars: in the terminal, and as a picture.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ptdp.planner.search import Candidate, Plan

__all__ = ["bars", "draw", "draw_what_if"]

_WIDTH = 60
_GIB = 2**30


def bars(plan: Plan, *, count: int = 5) -> str:
    """Two bars for each of the best: its step beside the slowest of them, its memory beside what there is; a letter a part."""
    shown = plan.best[:count]
    slowest = max(candidate.time.total for candidate in shown)
    return "\n".join(
        [
            _legend("time", _named([one.time.parts for one in shown])),
            *(f"  {i}  {_bar(one.time.parts, slowest):{_WIDTH}}  {one.time.total:.3g} s" for i, one in enumerate(shown, 1)),
            _legend("memory", _named([one.memory.parts for one in shown])),
            *(
                f"  {i}  {_bar(one.memory.parts, plan.job.device.usable_bytes):{_WIDTH}}  {one.memory.total / _GIB:.3g} GiB"
                for i, one in enumerate(shown, 1)
            ),
        ]
    )


def draw(plan: Plan, path: Path, *, count: int = 8) -> None:
    """The same as a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = plan.best[:count]
    figure = Figure(figsize=(10, 1.5 + 0.7 * len(shown)), layout="constrained")
    for axes, (title, unit, rows) in zip(
        figure.subplots(2, 1),
        (
            ("time of a step", "s", [one.time.parts for one in shown]),
            ("memory of the fullest rank", "GiB", [_scaled(one.memory.parts, 1 / _GIB) for one in shown]),
        ),
        strict=True,
    ):
        names = [f"{i}  {one.choice.describe()}" for i, one in enumerate(shown, 1)]
        left = [0.0] * len(shown)
        for part in _named(rows):
            lengths = [row[part] for row in rows]
            axes.barh(names, lengths, left=left, label=part)
            left = [start + length for start, length in zip(left, lengths, strict=True)]
        axes.invert_yaxis()
        axes.set(title=title, xlabel=unit)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def draw_what_if(found: Mapping[int, Sequence[tuple[int, Candidate]]], path: Path, *, tokens: Mapping[int, int]) -> None:
    """Tokens a second over the number of devices, a line for each batch.

    Args:
        found: For each batch, (devices, the best layout).
        path: Of the picture.
        tokens: Of a step, for each batch.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for batch, points in found.items():
        rates = [tokens[batch] / one.time.total for _, one in points]
        axes.plot([world for world, _ in points], rates, marker="o", label=f"batch {batch}")
        for (world, one), rate in zip(points, rates, strict=True):
            axes.annotate(one.choice.layout.describe(), (world, rate), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(xlabel="devices", ylabel="tokens/s", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def _named(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The parts that any of them has."""
    return [part for part in rows[0] if any(row[part] for row in rows)]


def _legend(title: str, parts: Sequence[str]) -> str:
    return f"{title}: " + ", ".join(f"{_letter(name)} {name}" for name in parts)


def _letter(name: str) -> str:
    return name[0] if name != "working" else "k"


def _bar(parts: Mapping[str, float], whole: float) -> str:
    """A letter for each part of the width; ends are rounded, so that the bar's length is right."""
    text, done = "", 0.0
    for name, value in parts.items():
        done += value
        text += _letter(name) * (round(_WIDTH * done / whole) - len(text))
    return text


def _scaled(parts: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * value for name, value in parts.items()}
