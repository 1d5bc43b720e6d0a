"""Callback that logs and draws the load of a mixture's experts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.callbacks.artifacts import keep_files
from lightning_ptdp.callbacks.expert_counts import ExpertCounts, LayerLoad, load_metrics


class ExpertLoad(Callback):
    """Callback that logs and draws how evenly a mixture's routers use their experts.

    Metrics are logged every ``log_every_n_steps`` steps for the steps since the last time, and for
    each validation with the prefix ``val_``:

    - ``expert_load_max`` and ``expert_load_min``: the tokens of the expert with the most and the
      least tokens in any layer, over the mean of its layer;
    - ``expert_load_entropy``: the entropy of the tokens' distribution over the experts of a layer,
      1 if it is even and 0 if one expert gets everything, mean over the layers;
    - ``dead_experts``: the number of experts of all layers that got no token;
    - ``router_entropy``: the entropy of a router's distribution for a token, scaled in the same
      way, mean over tokens and layers. It is computed from the scores that a sibling of the
      experts returns, one for each expert, as probabilities or before the softmax (also if the
      router takes each one's sigmoid). It is left out if no module returns such scores.

    At every validation the layers' loads are also written as ``step-000100.png``, one row per
    layer, and as ``step-000100.json``. An MLflow logger keeps both as artifacts. Choices are
    counted on the device, and the counts are read when they are logged. Modules that list their
    experts as Hugging Face's do (the kind "experts") are supported, with any strategy. For a model
    without such modules nothing is logged.

    Args:
        picture: Whether to write the files.
        dirpath: Folder of the files; default: the folder "experts" in the logger's folder, or in
            ``default_root_dir``.
    """

    def __init__(self, picture: bool = True, dirpath: str | None = None) -> None:
        check_arguments(ExpertLoad.__init__, locals())
        self.picture = picture
        self.dirpath = dirpath
        self._counts: ExpertCounts | None = None
        self._go_on: Callable[[], object] | None = None
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count."""
        self._attached(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log the metrics if they are due."""
        step = trainer.global_step
        interval = trainer.log_every_n_steps
        if step != self._step and interval and step % interval == 0:
            self._log(self._attached(trainer, pl_module).take(trainer))
        self._step = step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the counts of training aside."""
        self._go_on = self._attached(trainer, pl_module).aside()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics and draw the loads."""
        if trainer.sanity_checking:
            return
        layers = self._attached(trainer, pl_module).take(trainer)
        self._log(layers, "val_")
        if self.picture and layers and trainer.is_global_zero and not trainer.fast_dev_run:
            self._write(trainer, layers)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the counts of training."""
        if self._go_on is not None:
            self._go_on()
        self._go_on = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop counting."""
        if self._counts is not None:
            self._counts.detach()
        self._counts = self._go_on = None

    def _attached(self, trainer: Trainer, module: LightningModule) -> ExpertCounts:
        if self._counts is None:
            self._counts = ExpertCounts.attach(trainer, module)
        return self._counts

    def _log(self, layers: Sequence[LayerLoad], prefix: str = "") -> None:
        for name, value in load_metrics(layers).items():
            # The values are equal on all ranks; without sync_dist Lightning would warn in
            # validation.
            self.log(f"{prefix}{name}", value, batch_size=1, sync_dist=bool(prefix))

    def _write(self, trainer: Trainer, layers: Sequence[LayerLoad]) -> None:
        numbers = json.dumps({layer.name: layer.loads for layer in layers})
        title = f"step {trainer.global_step}"
        keep_files(
            trainer,
            {
                ".png": lambda file: draw_loads(layers, file, title=title),
                ".json": lambda file: file.write_text(numbers, encoding="utf-8"),
            },
            kind="experts",
            step=trainer.global_step,
            dirpath=self.dirpath,
        )


# ---- Picture of the load of each expert of each layer --------------------------------------------
#
# matplotlib is imported only when the picture is drawn.


_DPI = 160
_LOW = 0.25
_HIGH = 4.0
_NOTHING = 1e-9
_NUMBERED = 0.34
"""Inches of a cell that has space for its number."""


def draw_loads(layers: Sequence[LayerLoad], path: str | Path, *, title: str) -> None:
    """Write a PNG with one row per layer and one column per expert.

    The colour is the number of the expert's tokens over the mean of its layer. The scale is the
    same in every picture: it ends at a quarter of the mean and at four times the mean, and an
    expert without tokens is black. If there is space, the number is written."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = len(layers)
    columns = max(len(layer.loads) for layer in layers)
    width = max(3.6, min(8.6, columns * 0.5))
    cell = width / columns
    height = rows * min(0.32, max(0.09, min(cell, 7.0 / rows)))
    figure = Figure(figsize=(width + 1.62, height + 1.0), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    table = np.full((rows, columns), np.nan)
    for row, layer in enumerate(layers):
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
    stride = max(1, -(-rows * 16 // int(height * 100)))
    axes.set_yticks(range(0, rows, stride), map(_label, layers[::stride]))
    axes.set_ylabel("layer", fontsize=8)
    axes.set_xlabel("expert", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    metrics = load_metrics(layers)
    figure.suptitle(
        f"{title}: tokens of each expert over the mean\nlargest {metrics['expert_load_max']:.3g} "
        f"  ·   smallest {metrics['expert_load_min']:.3g}   ·   {metrics['dead_experts']:.0f} "
        "without tokens (black)",
        fontsize=8,
    )
    figure.savefig(path, facecolor="white")


def _label(layer: LayerLoad) -> str:
    """Return the number in the layer's name."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", layer.name)
    return numbers[-1] if numbers else ""
