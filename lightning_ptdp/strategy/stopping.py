"""SIGTERM and Ctrl-C as requests to all ranks to stop after the same batch.

Lightning's handler of SIGTERM runs a collective wherever the signal happens to find the rank, and
Ctrl-C raises there. Under a pipeline
both block: the other stages wait for this one's next message in a call of C++, where no Python
handler runs. So here the handlers only take a note, and the ranks agree where all of them come by.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.signals import SignalNotes, StoppedNow, handled, in_main_thread
from lightning_ptdp.shims.lightning import (
    Launcher,
    Trainer,
    announce_sigterm,
    register_signal_handlers,
    replace_signal_handlers,
)

__all__ = [
    "INTERRUPTED",
    "StopRequest",
    "ending_children_on_sigterm",
    "handing_on_ctrl_c",
    "not_handing_on",
]

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that ended by Ctrl-C."""

_ANNOUNCEMENT = "Ctrl-C: ends after this step (the callback SaveOnSignal() would save first); once more: ends now"
_HANDED_ON = "Ctrl-C: the processes end after their step; once more: they end now"
_TERMINATE, _INTERRUPT = 1, 2


class StopRequest:
    """Notes SIGTERM while ``trainer`` runs, instead of Lightning's handler, and Ctrl-C, unless it
    has a handler of the user's.

    Args:
        trainer: Whose loops end.
        alone: Whether there is no other rank: SIGTERM is Lightning's then.

    Attributes:
        received: Whether this rank got SIGTERM.
    """

    def __init__(self, trainer: Trainer, *, alone: bool) -> None:
        self._trainer = trainer
        self.received = False
        self._agreed: dict[dist.ProcessGroup, tuple[Tensor, torch.cuda.Event]] = {}
        self._notes = SignalNotes(_ANNOUNCEMENT if trainer.is_global_zero else "")
        replace_signal_handlers(
            trainer, sigterm=None if alone else self._note, register=self._register
        )

    def heed(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        interrupts: bool = True,
        beside: Tensor | None = None,
    ) -> tuple[bool, Sequence[int]]:
        """If any rank of ``group`` got SIGTERM, have Lightning's loop end on all of them after the
        batch; whether one got Ctrl-C, so that all of them are to end here. Collective, one message;
        on a GPU its answer is that of the call before, except for the first one, so that the host
        need not wait.

        Args:
            group: Ranks that work on the same batches; None is this rank alone.
            device: Where the group communicates.
            interrupts: Whether Ctrl-C may end them here.
            beside: (n) int64, numbers whose maximum over the group is returned too.
        """
        asked = _TERMINATE if self.received else 0
        if interrupts and signal.SIGINT in self._notes.received:
            asked = _INTERRUPT
        agreed: Sequence[int] = ()
        if group is not None:
            asked, *agreed = self._agree(asked, beside, group, device)
        if asked == _TERMINATE:
            announce_sigterm(self._trainer)
        return asked == _INTERRUPT, agreed

    def _agree(
        self, asked: int, beside: Tensor | None, group: dist.ProcessGroup, device: torch.device
    ) -> list[int]:
        agreed = torch.tensor([asked]).to(device, non_blocking=True)
        if beside is not None:
            agreed = torch.cat([agreed, beside])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        if device.type != "cuda":
            return [int(number) for number in agreed.tolist()]
        arrived = torch.cuda.Event()
        latest = agreed.to("cpu", non_blocking=True), arrived
        arrived.record()
        numbers, arrived = self._agreed.get(group, latest)
        self._agreed[group] = latest
        arrived.synchronize()
        return [int(number) for number in numbers.tolist()]

    def _register(self) -> None:
        """Behind Lightning's own, which takes back at the end of the run what was set meanwhile;
        before data is read by processes, which inherit the handler and survive the terminal's
        Ctrl-C."""
        register_signal_handlers(self._trainer)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._notes.take(signal.SIGINT)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            if self._trainer.strategy.launcher is not None:
                self._trainer.strategy.launcher.kill(
                    signum
                )  # hands it on to the processes that this one started


@contextlib.contextmanager
def ending_children_on_sigterm(launcher: Launcher) -> Iterator[None]:
    """Until Lightning has its own handler: SIGTERM kills the processes that ``launcher`` has
    started, then this one.

    By itself it would end this process alone, and the others would look for the store of this one
    until their time limit."""

    def end(signum: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) is end:  # else Lightning's handler has called it too
            launcher.kill(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    provided = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # by the user
    with contextlib.nullcontext() if provided else handled(signal.SIGTERM, end):
        yield


@contextlib.contextmanager
def handing_on_ctrl_c(launcher: Launcher) -> Iterator[None]:
    """While all ranks are processes that ``launcher`` started: Ctrl-C to this one asks them to end,
    as SIGTERM does, and the second kills them. That they have ended by it, or by a Ctrl-C of their
    own, is raised here.

    Raises:
        KeyboardInterrupt: Instead of what the launcher raises about processes that were told to
            end.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not in_main_thread():
        yield
        return
    notes = SignalNotes(_HANDED_ON)
    notes.take()
    signal.signal(signal.SIGINT, _HandsOn(launcher, notes))
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if notes.received or getattr(error, "exit_code", None) == INTERRUPTED:
            raise KeyboardInterrupt from error
        raise
    finally:
        not_handing_on()


def not_handing_on() -> None:
    """Leave that; also in a rank that has inherited it."""
    if isinstance(signal.getsignal(signal.SIGINT), _HandsOn):
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _HandsOn:
    def __init__(self, launcher: Launcher, notes: SignalNotes) -> None:
        self._launcher, self._notes, self._owner = launcher, notes, os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._owner or not self._launcher.procs
        ):  # just forked, or there is nobody yet
            signal.default_int_handler(signum, frame)
        try:
            self._notes.note(signum, frame)
        except StoppedNow:
            self._launcher.kill(signal.SIGKILL)
            raise
        self._launcher.kill(signal.SIGTERM)
