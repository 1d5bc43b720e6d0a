"""Picture of the load of each expert of each layer.

matplotlib is imported only when the picture is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lightning_ptdp.callbacks.expert_counts import ExpertLoads, LayerLoad

__all__ = ["draw_loads"]

_DPI = 160
_LOW, _HIGH = 0.25, 4.0
_NOTHING = 1e-9
_NUMBERED = 0.34
"""Inches of a cell that has space for its number."""


def draw_loads(loads: ExpertLoads, path: str | Path, *, title: str) -> None:
    """Write a PNG with one row per layer and one column per expert.

    The colour is the number of the expert's tokens over the mean of its layer. The scale is the
    same in every picture: it ends at a quarter of the mean and at four times the mean, and an
    expert without tokens is black. If there is space, the number is written."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, columns = len(loads.layers), max(len(layer.loads) for layer in loads.layers)
    width = max(3.6, min(8.6, columns * 0.5))
    cell = width / columns
    height = rows * min(0.32, max(0.09, min(cell, 7.0 / rows)))
    figure = Figure(figsize=(width + 1.62, height + 1.0), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    table = np.full((rows, columns), np.nan)
    for row, layer in enumerate(loads.layers):
        table[row, : len(layer.loads)] = layer.loads
    image = axes.imshow(
        np.where(table == 0, _NOTHING, table.clip(_LOW)),
        cmap=colormaps["RdBu_r"].with_extremes(bad="lightgray", under="black"),
        norm=LogNorm(_LOW, _HIGH),
        aspect="auto",
        interpolation="nearest",
    )
    for (row, column), value in np.ndenumerate(table):
        if cell >= _NUMBERED and not np.isnan(value):
            ink = "white" if value < 0.45 or value > 2.8 else "black"
            number = axes.text(column, row, f"{value:.2g}", fontsize=7, color=ink)
            number.set(ha="center", va="center")
    bar = figure.colorbar(image, ax=axes, extend="both", ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"], fontsize=7)
    bar.ax.minorticks_off()
    every = max(1, -(-rows * 16 // int(height * 100)))
    axes.set_yticks(range(0, rows, every), map(_label, loads.layers[::every]))
    axes.set_ylabel("layer", fontsize=8)
    axes.set_xlabel("expert", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    found = loads.metrics()
    figure.suptitle(
        f"{title}: tokens of each expert over the mean\nlargest {found['expert_load_max']:.3g} "
        f"  ·   smallest {found['expert_load_min']:.3g}   ·   {found['dead_experts']:.0f} "
        "without tokens (black)",
        fontsize=8,
    )
    figure.savefig(path, facecolor="white")


def _label(layer: LayerLoad) -> str:
    """Return the number in the layer's name."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", layer.name)
    return numbers[-1] if numbers else ""
