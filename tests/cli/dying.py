"""A callback that a configuration can name: it ends its process as the kernel does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as L


class DiesOnce(L.Callback):
    """Rank 1 dies when ``step`` begins, unless torchrun has started it again; writes down where
    training begins."""

    def __init__(self, step: int, notes: str) -> None:
        self._step, self._notes = step, Path(notes)
        self._restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        (self._notes / f"start-{self._restarts}-rank-{trainer.global_rank}").write_text(
            str(trainer.global_step)
        )

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._restarts == 0 and trainer.global_rank == 1 and trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)
