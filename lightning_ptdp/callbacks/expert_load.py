"""Callback that logs the load of a mixture's experts."""

from __future__ import annotations

import json
from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.callbacks.artifacts import keep_files
from lightning_ptdp.callbacks.expert_counts import ExpertCounts, ExpertLoads
from lightning_ptdp.callbacks.expert_picture import draw_loads

__all__ = ["ExpertLoad"]


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
      way, mean over tokens and layers. It is computed from the scores that a module beside the
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
        self.picture, self.dirpath = picture, dirpath
        self._counts: ExpertCounts | None = None
        self._go_on: Callable[[], None] | None = None
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count."""
        self._attached(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Log the metrics if they are due."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if step != self._step and every and step % every == 0:
            self._log(self._attached(trainer, pl_module).take(trainer))
        self._step = step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the counts of training aside."""
        self._go_on = self._attached(trainer, pl_module).aside()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics and draw the loads."""
        if trainer.sanity_checking:
            return
        loads = self._attached(trainer, pl_module).take(trainer)
        self._log(loads, "val_")
        if self.picture and loads.layers and trainer.is_global_zero and not trainer.fast_dev_run:
            self._write(trainer, loads)

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

    def _log(self, loads: ExpertLoads, prefix: str = "") -> None:
        for name, value in loads.metrics().items():
            # The values are equal on all ranks; without sync_dist Lightning would warn in
            # validation.
            self.log(f"{prefix}{name}", value, batch_size=1, sync_dist=bool(prefix))

    def _write(self, trainer: Trainer, loads: ExpertLoads) -> None:
        numbers = json.dumps({layer.name: layer.loads for layer in loads.layers})
        title = f"step {trainer.global_step}"
        keep_files(
            trainer,
            {
                ".png": lambda file: draw_loads(loads, file, title=title),
                ".json": lambda file: file.write_text(numbers, encoding="utf-8"),
            },
            kind="experts",
            step=trainer.global_step,
            dirpath=self.dirpath,
        )
