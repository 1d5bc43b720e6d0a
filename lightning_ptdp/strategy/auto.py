"""Planner's choice for ``layout="auto"``, and its comparison with the measured step time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lightning_ptdp.base.forked_processes import in_child
from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.planner import device_here
from lightning_ptdp.shims.lightning import Trainer
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.checks import check_data, check_model, check_trainer
from lightning_ptdp.strategy.checks.whole_model import whole_model
from lightning_ptdp.strategy.layout_choice import (
    Forecast,
    LayoutChoice,
    Training,
    choose,
    refuse_given,
    replica_rows,
)
from lightning_ptdp.strategy.precision import replacing
from lightning_ptdp.world.axes import divisors


def wants_choice(layout: LayoutChoice | None, config: PTDPConfig) -> bool:
    """Return True if the planner is to choose the layout.

    Raises:
        ValueError: ``layout`` is neither "auto" nor None, or options of the layout are given as
            well.
    """
    if layout not in ("auto", None):
        raise ValueError(
            f"layout={layout!r:.100} must be 'auto'. To set sizes, leave it out and use "
            "options such as tensor_parallel_size=2"
        )
    if layout == "auto":
        refuse_given(config)
    return layout == "auto"


def chosen_layout(
    strategy: CheckpointHooks, trainer: Trainer, sources: Sequence[object]
) -> tuple[PTDPConfig, Forecast]:
    """Return the strategy's options with the layout that the planner chooses, and its forecast.

    Every process makes the same choice, because all read the same script, data and machine file.

    Raises:
        ValueError: The batch size or the device are unknown, or no layout fits.
    """
    rows = replica_rows(sources)
    if all(rows(replicas) is None for replicas in divisors(strategy.world_size)):
        raise ValueError(
            "layout='auto' needs the batch size. Give fit a DataLoader or a data module "
            "that has batch sizes"
        )
    options = strategy.config
    forks = options.start_method == "fork" and strategy.world_size > 1
    name = _device_name(strategy.root_device, forks=forks)
    device = device_here(name)
    if device is None:
        raise ValueError(
            f"layout='auto' does not know the device {name}. Run ptdp doctor "
            "--calibrate to measure it"
        )
    model = whole_model(strategy.lightning_module, options)

    def fits(config: PTDPConfig) -> None:
        strategy.config = config
        try:
            check_trainer(strategy, trainer)
        except strategy._names.MisconfigurationException as error:
            raise ValueError(str(error)) from error
        convert = replacing(strategy.precision_plugin, strategy._names)
        check_model(
            strategy.lightning_module, config, strategy.layout, convert=convert, whole=model
        )
        for source in sources:
            check_data(source, config, strategy.layout)

    lengths = (data.sequence_length for data in sources if hasattr(data, "sequence_length"))
    training = Training(
        module=model,
        config=options,
        world_size=strategy.world_size,
        rows=rows,
        length=next(lengths, None),
        device=device,
        precision=str(trainer.precision),
        forks=forks,
    )
    try:
        return choose(training, fits=fits)
    finally:
        strategy.config = options


def _device_name(device: torch.device, *, forks: bool) -> str:
    """Return the device's name, asked in a child process because asking a GPU starts CUDA."""
    ask = partial(device_name, device)
    return in_child(ask) if forks and device.type != "cpu" else ask()


def report_forecast(forecast: Forecast, trainer: Trainer, device: torch.device) -> None:
    """Log the forecast beside the measurements, and print a message if it was far off."""
    measured = forecast.measured
    if measured is None:
        return
    metrics = {
        "predicted_step_s": forecast.seconds,
        "measured_step_s": measured,
        "predicted_bytes": forecast.memory,
    }
    if device.type == "cuda":
        metrics["measured_bytes"] = float(torch.cuda.max_memory_allocated(device))
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
    if verdict := forecast.verdict():
        print(verdict, flush=True)
