"""Pictures of the documentation that no command draws: ``python docs/figures.py`` writes them to
docs/images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lightning_ptdp import ParallelLayout

IMAGES = Path(__file__).resolve().parent / "images"
COLORS = ("#4c78a8", "#f58518")


def draw_ranks(path: Path) -> None:
    """Eight ranks, t = p = d = 2, on two nodes."""
    layout = ParallelLayout(
        world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2, virtual_pipeline_size=2
    )
    figure = Figure(figsize=(9, 3.2), dpi=110)
    axes = figure.subplots()
    for rank in range(layout.world_size):
        _draw_rank(axes, layout, rank)
    for node in range(2):
        x = node * 5.0
        axes.add_patch(
            _box(x - 0.15, -0.2, 4.5, 2.65, fill=False, edgecolor="#999999", linestyle="--")
        )
        axes.text(
            x + 2.1,
            2.55,
            f"node {node}: pipeline rank {node}, stages {layout.stages_of(node)}",
            ha="center",
            color="#666666",
        )
    for y, replica in ((1.7, 0), (0.5, 1)):
        axes.annotate("", (5.0, y), (4.2, y), arrowprops={"arrowstyle": "<->", "color": "#666666"})
        axes.text(-0.4, y, f"replica {replica}", ha="right", va="center", color="#666666")
    axes.text(
        4.6,
        1.1,
        "pipeline",
        ha="center",
        va="center",
        rotation=90,
        color="#666666",
        bbox={"color": "white", "pad": 1},
    )
    axes.set(xlim=(-1.8, 9.6), ylim=(-0.35, 2.9))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", facecolor="white")


def _draw_rank(axes: Any, layout: ParallelLayout, rank: int) -> None:
    at = layout.coordinates(rank)
    x, y = at["pipeline"] * 5.0 + at["tensor"] * 2.15, (1 - at["data"]) * 1.2
    axes.add_patch(
        _box(x, y, 2.0, 1.0, facecolor=COLORS[at["tensor"]], alpha=0.85, edgecolor="white")
    )
    axes.text(
        x + 1.0, y + 0.62, f"rank {rank}", ha="center", va="center", color="white", weight="bold"
    )
    axes.text(
        x + 1.0,
        y + 0.28,
        f"tensor {at['tensor']}, data {at['data']}",
        ha="center",
        va="center",
        color="white",
        size=8,
    )


def _box(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    return Rectangle((x, y), width, height, **style)


if __name__ == "__main__":
    draw_ranks(IMAGES / "ranks.png")
