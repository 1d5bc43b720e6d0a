"""Callback that kills its process, for use in a configuration."""

import os
import signal
from pathlib import Path

import lightning.pytorch as L


class DiesOnce(L.Callback):
    """Kills rank 1 at the start of ``step``, unless torchrun has restarted it; records the step at
    which training starts."""

    def __init__(self, step: int, notes: str) -> None:
        self._step, self._notes = step, Path(notes)
        self._restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def on_train_start(self, trainer, *_):
        (self._notes / f"start-{self._restarts}-rank-{trainer.global_rank}").write_text(
            str(trainer.global_step)
        )

    def on_train_batch_start(self, trainer, *_):
        if self._restarts == 0 and trainer.global_rank == 1 and trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)
