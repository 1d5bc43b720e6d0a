"""SIGTERM as a request to all ranks to stop after the same batch.

Lightning's handler runs a collective wherever the signal happens to find the rank. Under a pipeline that comes to a stand still: the
other stages wait for this one's next message in a call of C++, where no Python handler runs, and this one waits for them in the
handler. So here the handler only takes a note, and the ranks agree where all of them come by.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp._lightning import announce_sigterm, replace_sigterm_notifier

__all__ = ["StopRequest", "ending_children_on_sigterm"]


class StopRequest:
    """Notes SIGTERM while ``trainer`` runs, instead of Lightning's handler.

    Attributes:
        received: Whether this rank got the signal.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.received = False
        replace_sigterm_notifier(trainer, self._note)

    def heed(self, group: Any, device: torch.device) -> None:
        """If any rank of ``group`` got the signal, have Lightning's loop end on all of them after the batch; collective, one bit.

        Args:
            group: Ranks that work on the same batches; None is this rank alone.
            device: Where the group communicates.
        """
        received = torch.tensor(int(self.received), device=device)
        if group is not None:
            dist.all_reduce(received, op=dist.ReduceOp.MAX, group=group)
        if received:
            announce_sigterm(self._trainer)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            if self._trainer.strategy.launcher is not None:
                self._trainer.strategy.launcher.kill(signum)  # hands it on to the processes that this one started


@contextlib.contextmanager
def ending_children_on_sigterm(launcher: Any) -> Iterator[None]:
    """Until Lightning has its own handler: SIGTERM kills the processes that ``launcher`` has started, then this one.

    By itself it would end this process alone, and the others would look for the store of this one until their time limit.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield  # the user has made provision, or Python allows none
        return

    def end(signum: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is end:  # else Lightning's handler has called it too
            launcher.kill(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
