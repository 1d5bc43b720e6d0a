"""Training runs that lose or delay a rank, on a backend with NCCL's behaviour (tests/queued.py)."""

import os
import signal
import threading
import time
from pathlib import Path

from lightning_ptdp.checkpoint.save_agreement import own_rank
from tests.conformance.toys import LitNet, Place, loader, make_trainer
from tests.queued import HOST, habits

__all__ = ["LIMIT_S", "Loses", "Works", "train", "work"]

LIMIT_S = 4.0
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Loses(LitNet):
    """Model whose victim rank freezes, dies, fails or blocks in the second step."""

    def __init__(self, victim: int, how: str) -> None:
        super().__init__()
        self.victim, self.how = victim, how

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and own_rank() == self.victim:
            HOST.drain()
            if self.how == "raise":
                raise ValueError("a bad batch")
            if self.how == "wait":
                threading.Event().wait()
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.how])
        return super().training_step(batch, batch_idx)


def train(rank: int, victim: int, how: str, folder: str) -> None:
    """Train and lose ``victim``. A rank that fails keeps its process alive."""
    place = Place(world_size=2, layout={**P2, "timeout_s": LIMIT_S})
    with habits():
        try:
            make_trainer(place, default_root_dir=folder).fit(Loses(victim, how), loader())
        except ValueError:
            threading.Event().wait()


class Works(LitNet):
    """Model with long user code: in a step, between steps and after validation."""

    busy_s = 1.5 * LIMIT_S

    def training_step(self, batch, batch_idx):
        if self.global_step == 0:
            began = time.monotonic()  # like a compilation
            while time.monotonic() - began < self.busy_s:
                sum(range(1000))
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            time.sleep(self.busy_s)

    def on_validation_epoch_end(self):
        time.sleep(self.busy_s)


def work(rank: int, folder: str) -> None:
    """Train to the end, with a watchdog limit far below that of the process groups."""
    place = Place(world_size=2, layout={"timeout_s": LIMIT_S})
    with habits():
        trainer = make_trainer(
            place, default_root_dir=folder, max_steps=2, val_check_interval=2, limit_val_batches=1
        )
        trainer.fit(Works(), loader(), loader())
    Path(folder, f"{rank}.txt").write_text("worked")
