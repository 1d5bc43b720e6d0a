"""Callback that keeps the resolved configuration with the run."""

from __future__ import annotations

from pathlib import Path

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.callbacks.artifacts import run_folder, store_text

__all__ = ["SaveResolvedConfig"]


class SaveResolvedConfig(Callback):
    """Callback that writes ``config.yaml`` into the run folder, and as an artifact in MLflow.

    Every logger gets the Trainer's and the strategy's keys as hyperparameters, in addition to those
    of the module and the data, which Lightning logs. A run that is resumed in the same folder with
    another configuration writes ``config-1.yaml`` and so on. No file is overwritten.

    Args:
        text: The resolved configuration as YAML.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration, on global rank 0."""
        if stage != "fit" or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        path = _unused(run_folder(trainer), self.text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text, encoding="utf-8")
        for logger in trainer.loggers:
            store_text(logger, self.text, path.name)
            logger.log_hyperparams(_parameters(self.text))


_OBJECTS = ("callbacks", "logger", "plugins", "profiler", "strategy")
"""Keys of the Trainer that are objects, not values."""


def _parameters(text: str) -> dict[str, object]:
    config = yaml.safe_load(text)
    trainer = config.get("trainer") or {}
    strategy = trainer.get("strategy")
    return {
        "seed_everything": config.get("seed_everything"),
        "trainer": {key: value for key, value in trainer.items() if key not in _OBJECTS},
        "strategy": strategy.get("init_args", strategy) if isinstance(strategy, dict) else strategy,
    }


def _unused(folder: Path, text: str) -> Path:
    """Return the first of config.yaml, config-1.yaml, … that is free or holds ``text``."""
    path, number = folder / "config.yaml", 0
    while path.exists() and path.read_text(encoding="utf-8") != text:
        number += 1
        path = folder / f"config-{number}.yaml"
    return path
