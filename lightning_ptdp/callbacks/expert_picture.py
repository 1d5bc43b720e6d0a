"""Picture of the load of each expert of each layer.

matplotlib is imported only when the picture is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lightning_ptdp.callbacks.expert_counts import ExpertLoads, LayerLoad

__all__ = ["draw_loads"]

_DPI = 160
_WIDTH, _LEAST_WIDTH, _LEFT, _RIGHT, _TOP, _FOOT = 8.6, 3.6, 0.62, 1.0, 0.5, 0.5
_LOW, _HIGH = 0.25, 4.0
_NUMBERED = 0.34
_HIGH_FOR_ALL = 7.0


def draw_loads(loads: ExpertLoads, path: str | Path, *, title: str) -> None:
    """Write a PNG with one row per layer and one column per expert.

    The colour is the number of the expert's tokens over the mean of its layer. The scale is the
    same in every picture: it ends at a quarter of the mean and at four times the mean, and an
    expert without tokens is black. If there is space, the number is written."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, columns = len(loads.layers), max(len(layer.loads) for layer in loads.layers)
    wide = max(_LEAST_WIDTH, min(_WIDTH, columns * 0.5))
    cell = wide / columns
    high = rows * min(0.32, max(0.09, min(cell, _HIGH_FOR_ALL / rows)))
    size = (_LEFT + wide + _RIGHT, _TOP + high + _FOOT)
    figure = Figure(figsize=size, dpi=_DPI)
    axes = figure.add_axes((_LEFT / size[0], _FOOT / size[1], wide / size[0], high / size[1]))
    colours = figure.add_axes(
        ((_LEFT + wide + 0.14) / size[0], _FOOT / size[1], 0.13 / size[0], high / size[1])
    )

    table = np.full((rows, columns), np.nan)
    for row, layer in enumerate(loads.layers):
        table[row, : len(layer.loads)] = layer.loads
    image = axes.imshow(
        table,
        cmap=colormaps["RdBu_r"].with_extremes(bad="lightgray"),
        norm=LogNorm(_LOW, _HIGH),
        aspect="auto",
        interpolation="nearest",
    )
    axes.imshow(
        np.where(table == 0, 0.0, np.nan),
        cmap="gray",
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    if cell >= _NUMBERED:
        for (row, column), value in np.ndenumerate(table):
            ink = "white" if value < 0.45 or value > 2.8 else "black"
            axes.text(
                column,
                row,
                "" if np.isnan(value) else f"{value:.2g}",
                ha="center",
                va="center",
                fontsize=7,
                color=ink,
            )
    bar = figure.colorbar(
        image, cax=colours, extend="both" if high > 1 else "neither", ticks=[0.25, 0.5, 1, 2, 4]
    )
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"], fontsize=7)
    bar.ax.minorticks_off()

    every = max(1, -(-rows * 16 // int(high * 100)))
    axes.set_yticks(
        range(0, rows, every), [_label(layer) for layer in loads.layers[::every]], fontsize=7
    )
    axes.set_ylabel("layer", fontsize=8)
    axes.set_xlabel("expert", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=7, length=2)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.text(
        _LEFT / size[0],
        1 - 0.2 / size[1],
        f"{title}: tokens of each expert over the mean",
        fontsize=9,
        fontweight="bold",
        va="center",
    )
    figure.text(_LEFT / size[0], 1 - 0.38 / size[1], _said(loads), fontsize=7.5, va="center")
    figure.savefig(path, facecolor="white")


def _said(loads: ExpertLoads) -> str:
    found = loads.metrics()
    dead = int(found["dead_experts"])
    return (
        f"largest {found['expert_load_max']:.3g}   ·   smallest {found['expert_load_min']:.3g}   "
        f"·   {dead} got nothing (black)"
    )


def _label(layer: LayerLoad) -> str:
    """Return the number in the layer's name."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", layer.name)
    return numbers[-1] if numbers else ""
