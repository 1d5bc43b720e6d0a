"""Callback that measures the share of a training's time in steps that counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["Goodput"]


class Goodput(Callback):
    """Callback that logs the share of wall time in steps that counted, as ``goodput``.

    Time runs from the start of the first process of the training, through all restarts, to the end.
    The rest are imports, set-up, loading of data, validation, checkpoints, waiting between runs,
    and steps that were repeated because they were not in the checkpoint from which a run resumed.
    """

    def __init__(self) -> None:
        self._began: float = psutil.Process().create_time()
        self._in_steps = self._batch_began = 0.0

    @property
    def share(self) -> float:
        """Return the share until now."""
        return self._in_steps / max(time.time() - self._began, 1e-9)

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the batch."""
        self._in_steps += time.perf_counter() - self._batch_began

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share, on global rank 0."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"goodput": self.share}, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that resumes here continues."""
        return {"began": self._began, "in_steps": self._in_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the training that was saved."""
        self._began = float(state_dict["began"])
        self._in_steps = float(state_dict["in_steps"])
