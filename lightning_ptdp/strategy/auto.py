"""Planner's choice for ``layout="auto"``, and its comparison with the measured step time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.planner import device_here
from lightning_ptdp.shims.lightning import Trainer
from lightning_ptdp.strategy.checks import check_data, check_model, check_trainer
from lightning_ptdp.strategy.checks.whole_model import whole_model
from lightning_ptdp.strategy.fork_safety import in_child
from lightning_ptdp.strategy.layout_choice import (
    Forecast,
    LayoutChoice,
    Training,
    choose,
    refuse_given,
    replica_rows,
)
from lightning_ptdp.strategy.precision import replacing
from lightning_ptdp.strategy.running_strategy import RunningStrategy
from lightning_ptdp.world.axes import divisors

__all__ = ["ChosenLayout"]


class ChosenLayout(RunningStrategy):
    """Mixin of the strategy: layout options chosen by the planner, if requested."""

    _chooses: bool
    _forecast: Forecast | None

    def _will_choose(self, layout: LayoutChoice | None) -> None:
        """Store whether the planner chooses the layout.

        Raises:
            ValueError: ``layout`` is neither "auto" nor None, or options of the layout are given as
                well.
        """
        if layout not in ("auto", None):
            raise ValueError(
                f"layout={layout!r:.100} must be 'auto'. To set sizes, leave it out and use "
                "options such as tensor_parallel_size=2"
            )
        self._chooses, self._forecast = layout == "auto", None
        if self._chooses:
            refuse_given(self.config)

    def _choose(self, trainer: Trainer, sources: Sequence[object]) -> None:
        """Let the planner choose the layout, if requested and not done yet.

        A further fit continues in the same layout. Every process makes the same choice, because all
        read the same script, data and machine file."""
        if not self._chooses:
            return
        rows = replica_rows(sources)
        if all(rows(replicas) is None for replicas in divisors(self.world_size)):
            raise ValueError(
                "layout='auto' needs the batch size. Give fit a DataLoader or a data module "
                "that has batch sizes"
            )
        name = self._device_name()
        device = device_here(name)
        if device is None:
            raise ValueError(
                f"layout='auto' does not know the device {name}. Run ptdp doctor "
                "--calibrate to measure it"
            )
        given, whole = self.config, whole_model(self.lightning_module, self.config)

        def fits(config: PTDPConfig) -> None:
            self.config = config
            try:
                check_trainer(self, trainer)
            except self._names.MisconfigurationException as error:
                raise ValueError(str(error)) from error
            convert = replacing(self.precision_plugin, self._names)
            check_model(self.lightning_module, config, self.layout, convert=convert, whole=whole)
            for source in sources:
                check_data(source, config, self.layout)

        training = Training(
            module=whole,
            config=given,
            world_size=self.world_size,
            rows=rows,
            length=next(
                (
                    source.sequence_length
                    for source in sources
                    if hasattr(source, "sequence_length")
                ),
                None,
            ),
            device=device,
            precision=str(trainer.precision),
            forks=_forks(given, self.world_size),
        )
        try:
            self.config, self._forecast = choose(training, fits=fits)
        except BaseException:
            self.config = given
            raise
        self._chooses = False
        if self.is_global_zero:
            print(self._forecast.text, flush=True)

    def _device_name(self) -> str:
        """Return the device's name, asked in a child process because asking a GPU starts CUDA."""
        ask = partial(device_name, self.root_device)
        return (
            in_child(ask)
            if _forks(self.config, self.world_size) and self.root_device.type != "cpu"
            else ask()
        )

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Record the start of the batch if the layout was chosen by a forecast."""
        super().on_train_batch_start(batch, batch_idx)
        if self._forecast is not None:
            self._forecast.batch_begins()

    def on_train_end(self) -> None:
        """Log the forecast beside the measurements, and print a message if it was far off."""
        super().on_train_end()
        if (
            self._forecast is None
            or not self.is_global_zero
            or (measured := self._forecast.measured) is None
        ):
            return
        metrics = {
            "predicted_step_s": self._forecast.seconds,
            "measured_step_s": measured,
            "predicted_bytes": self._forecast.memory,
        }
        if self.root_device.type == "cuda":
            metrics["measured_bytes"] = float(torch.cuda.max_memory_allocated(self.root_device))
        trainer = self.lightning_module.trainer
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        if verdict := self._forecast.verdict():
            print(verdict, flush=True)


def _forks(config: PTDPConfig, world_size: int) -> bool:
    return config.start_method == "fork" and world_size > 1
