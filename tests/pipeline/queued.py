"""Communication whose waits return at once, as NCCL's do, and training that loses a rank under it: in processes of their own.

On a device a wait only queues work, and the host blocks where it reads the result. Here a thread does the waiting, and
what was received is read when an event is set that never comes if the message does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lightning_ptdp.pipeline.p2p import Receipt, Transport
from lightning_ptdp.pipeline.watchdog import Watchdog
from tests.conformance.toys import LitNet, Place, loader, make_trainer

__all__ = ["LIMIT_S", "Loses", "Works", "train", "work"]

LIMIT_S = 2.0
P2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}


def _queue_waits() -> None:
    """In this process, for good."""
    queued: list[threading.Event] = []

    def finish(work: Any, done: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()
            done.set()

    def wait(self: Transport, work: Any, what: str, peer: int) -> None:
        assert self.waiting is not None
        self.waiting(what, peer)
        queued.append(threading.Event())
        threading.Thread(target=finish, args=(work, queued[-1]), daemon=True).start()
        self.waiting(what, None)

    arrived = Receipt._arrived

    def read(self: Receipt) -> Any:
        buffers = arrived(self)
        while queued:
            queued.pop(0).wait()
        return buffers

    Transport.wait, Receipt._arrived = wait, read  # type: ignore[method-assign]


def _as_on_nccl(**changes: Any) -> None:
    """The watchdog knows of no wait that raises; in this process, for good."""
    init = Watchdog.__init__

    def start(self: Watchdog, **options: Any) -> None:
        init(self, **{**options, "waits_raise": False, **changes})

    Watchdog.__init__ = start  # type: ignore[method-assign]


class Loses(LitNet):
    """In the second step one rank is frozen or killed, fails, or does not come."""

    def __init__(self, victim: int, how: str) -> None:
        super().__init__()
        self.victim, self.how = victim, how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == self.victim:
            if self.how == "raise":
                raise ValueError("a bad batch")
            if self.how == "wait":
                threading.Event().wait()
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.how])
        return super().training_step(batch, batch_idx)


def _environment(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))


def train(rank: int, victim: int, how: str, folder: str) -> None:
    """Lose ``victim``; what does not end by itself stays."""
    _environment(rank)
    _queue_waits()
    _as_on_nccl()
    place = Place(world_size=2, layout={**P2, "timeout_s": LIMIT_S})
    try:
        make_trainer(place, default_root_dir=folder).fit(Loses(victim, how), loader())
    except ValueError:
        threading.Event().wait()


class Works(LitNet):
    """Long work of the user's on the host, wherever there may be some."""

    busy_s = 1.5 * LIMIT_S

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            began = time.monotonic()  # as a compilation
            while time.monotonic() - began < self.busy_s:
                sum(range(1000))
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            time.sleep(self.busy_s)

    def on_validation_epoch_end(self) -> None:
        time.sleep(self.busy_s)


def work(rank: int, folder: str) -> None:
    """Train to the end, with a watchdog that is far less patient than the process groups."""
    _environment(rank)
    _as_on_nccl(limit_s=LIMIT_S)
    place = Place(world_size=2, layout={"timeout_s": 60.0})
    trainer = make_trainer(place, default_root_dir=folder, max_steps=2, val_check_interval=2, limit_val_batches=1)
    trainer.fit(Works(), loader(), loader())
    Path(folder, f"{rank}.txt").write_text("worked")
