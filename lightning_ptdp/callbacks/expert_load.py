"""Callback that logs the load of a mixture's experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.callbacks.artifacts import store_files
from lightning_ptdp.callbacks.expert_counts import ExpertCounts, ExpertLoads
from lightning_ptdp.callbacks.expert_picture import draw_loads
from lightning_ptdp.callbacks.run_location import run_folder

__all__ = ["ExpertLoad"]


class ExpertLoad(Callback):
    """Log how evenly a mixture's routers use their experts, and draw it at every validation.

    Logged are, of the steps since the last time every ``log_every_n_steps``, and with ``val_``
    before the name of each validation:

    - ``expert_load_max`` and ``expert_load_min``: the tokens of the expert that got most, and
      least, in any layer, over the mean of its layer;
    - ``expert_load_entropy``: the entropy of the tokens' distribution over the experts of a layer,
      1 where it is even and 0 where one gets everything, mean over the layers;
    - ``dead_experts``: how many, of all layers together, got nothing;
    - ``router_entropy``: the entropy of what a router says of a token, in the same way, mean over
      tokens and layers. Of the scores that a module beside the experts returns, one for each
      expert, as probabilities or before the softmax (also where the router takes each one's
      sigmoid); left out where none does.

    The layers' loads are also written as ``step-000100.png``, a row a layer, and
    ``step-000100.json``, which an MLflow logger keeps as artifacts. Counted are choices, on the
    device; it is read when something is logged. Known are modules that list their experts as
    Hugging Face's do (the kind "experts"), whatever the strategy; of a model without them nothing
    is logged.

    Args:
        picture: Whether to write the files.
        dirpath: Where they go; default: the folder "experts" in the logger's folder, or in
            ``default_root_dir``.
    """

    def __init__(self, picture: bool = True, dirpath: str | None = None) -> None:
        check_arguments(ExpertLoad.__init__, locals())
        self.picture, self.dirpath = picture, dirpath
        self._counts: ExpertCounts | None = None
        self._go_on: Callable[[], None] | None = None
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        self._attached(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log, if it is time."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if step != self._step and every and step % every == 0:
            self._log(self._attached(trainer, pl_module).take(trainer))
        self._step = step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what was counted in training."""
        self._go_on = self._attached(trainer, pl_module).aside()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log and draw."""
        if trainer.sanity_checking:
            return
        loads = self._attached(trainer, pl_module).take(trainer)
        self._log(loads, "val_")
        if self.picture and loads.layers and trainer.is_global_zero and not trainer.fast_dev_run:
            self._write(trainer, loads)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with what was counted in training."""
        if self._go_on is not None:
            self._go_on()
        self._go_on = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End to count."""
        if self._counts is not None:
            self._counts.detach()
        self._counts = self._go_on = None

    def _attached(self, trainer: Trainer, module: LightningModule) -> ExpertCounts:
        if self._counts is None:
            self._counts = ExpertCounts.attach(trainer, module)
        return self._counts

    def _log(self, loads: ExpertLoads, prefix: str = "") -> None:
        for name, value in loads.metrics().items():
            self.log(
                f"{prefix}{name}", value, batch_size=1, sync_dist=bool(prefix)
            )  # equal on all ranks; Lightning would warn

    def _write(self, trainer: Trainer, loads: ExpertLoads) -> None:
        folder = Path(self.dirpath) if self.dirpath is not None else run_folder(trainer) / "experts"
        picture, numbers = (
            folder / f"step-{trainer.global_step:06d}{suffix}" for suffix in (".png", ".json")
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers.write_text(
                json.dumps({layer.name: layer.loads for layer in loads.layers}), encoding="utf-8"
            )
            draw_loads(loads, picture, title=f"step {trainer.global_step}")
        except OSError as error:  # a full disk: training does not end for it
            rank_zero_warn(
                f"the experts' loads at step {trainer.global_step} could not be written: {error}"
            )
            return
        for logger in trainer.loggers:
            store_files(logger, [picture, numbers], folder="experts")
