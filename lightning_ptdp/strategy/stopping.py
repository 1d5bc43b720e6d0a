"""Requests by SIGTERM and Ctrl-C, after which all ranks stop at the same batch.

On SIGTERM Lightning's handler runs a collective immediately, wherever the rank is, and on Ctrl-C it
raises there. Both block under a pipeline, because the other stages wait for this rank's next
message in a C++ call, where no Python handler runs. The handlers of this module therefore only
record the signal, and the ranks agree at a point that all of them reach.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.signals import (
    HandlerOfProcess,
    SignalNotes,
    StoppedNow,
    handled,
    in_main_thread,
)
from lightning_ptdp.callbacks.save_on_signal import SaveOnSignal
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.shims.lightning import (
    Launcher,
    Trainer,
    announce_sigterm,
    register_signal_handlers,
    replace_signal_handlers,
)

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that ended by Ctrl-C."""

_ANNOUNCEMENT = "Ctrl-C: training ends after this step{}. Press it again to end now"
_UNSAVED = " (without saving; the callback SaveOnSignal() saves first)"
_HANDED_ON = "Ctrl-C: the processes end after their step. Press it again to end them now"
_TERMINATE = 1
_INTERRUPT = 2


class StopRequest:
    """Record of SIGTERM and Ctrl-C while ``trainer`` runs.

    It replaces Lightning's handler of SIGTERM. It handles Ctrl-C unless the user has set a handler.

    Args:
        trainer: Trainer whose loops end.
        alone: Whether there is no other rank; Lightning then handles SIGTERM.

    Attributes:
        received: Whether this rank got SIGTERM.
    """

    def __init__(self, trainer: Trainer, *, alone: bool) -> None:
        self._trainer = trainer
        self.received = False
        self._agreed: dict[dist.ProcessGroup, tuple[Tensor, torch.cuda.Event]] = {}
        # Before the first step, which SaveOnSignal waits for, there is nothing to save.
        saves = any(isinstance(callback, SaveOnSignal) for callback in trainer.callbacks)
        announcement = _ANNOUNCEMENT.format("" if saves else _UNSAVED)
        self._notes = SignalNotes(announcement if trainer.is_global_zero else "")
        replace_signal_handlers(
            trainer, sigterm=None if alone else self._note, register=self._register
        )

    def agree(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        interrupts: bool = True,
        numbers: Tensor | None = None,
    ) -> tuple[bool, Sequence[int]]:
        """Agree over ``group`` on requests to stop; return True if all ranks must end here.

        After SIGTERM on any rank, Lightning's loop ends on all ranks after the batch. After Ctrl-C
        on any rank, all ranks must end here. Collective, with one message. On a GPU, every call
        except the first returns the answer of the previous call, so that the host need not wait.

        Args:
            group: Ranks that work on the same batches; None is this rank alone.
            device: Device with which the group communicates.
            interrupts: Whether a signal may end the ranks here. If not, a later call reports it.
            numbers: (n) int64; their maxima over the group are returned too.
        """
        request = _TERMINATE if self.received else 0
        if interrupts and signal.SIGINT in self._notes.received:
            request = _INTERRUPT
        maxima: Sequence[int] = ()
        if group is not None:
            request, *maxima = self._maxima(request, numbers, group, device)
        if request == _TERMINATE and interrupts:
            announce_sigterm(self._trainer)
        return request == _INTERRUPT, maxima

    def _maxima(
        self, request: int, numbers: Tensor | None, group: dist.ProcessGroup, device: torch.device
    ) -> list[int]:
        maxima = torch.tensor([request]).to(device, non_blocking=True)
        if numbers is not None:
            maxima = torch.cat([maxima, numbers])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        if device.type != "cuda":
            return [int(number) for number in maxima.tolist()]
        event = torch.cuda.Event()
        latest = maxima.to("cpu", non_blocking=True), event
        event.record()
        earlier = self._agreed.get(group, latest)
        self._agreed[group] = latest
        return _read(*earlier)

    def newest(self, group: dist.ProcessGroup) -> list[int]:
        """Wait for the maxima of the last call of ``agree`` on a GPU, and return them."""
        return _read(*self._agreed[group])[1:]

    def _register(self) -> None:
        """Register the handlers after Lightning's own.

        At the end of the run Lightning restores handlers set meanwhile. The handlers are set before
        data-reading processes start, which inherit them and so survive the terminal's Ctrl-C."""
        register_signal_handlers(self._trainer)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._notes.take(signal.SIGINT)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received = True
            if self._trainer.strategy.launcher is not None:
                # Forward the signal to the processes that this one started.
                self._trainer.strategy.launcher.kill(signum)


def _read(copy: Tensor, copied: torch.cuda.Event) -> list[int]:
    copied.synchronize()
    return [int(number) for number in copy.tolist()]


@contextlib.contextmanager
def ending_on_sigterm(launcher: Launcher, close: Callable[[], None]) -> Iterator[None]:
    """Kill the started processes on SIGTERM, call ``close`` and end, until Lightning has a handler.

    By default SIGTERM would end only this process: the other ranks would look for its store until
    their time limit, and a logger's run would look as if it still ran.

    After an exception, Lightning restores this handler, which it found, when the context has ended.
    The handler then has no reference to the run, and ends only this process."""
    owner = os.getpid()
    actions: list[Callable[[], None]] = [partial(launcher.kill, signal.SIGKILL), close]

    def end(signum: int, _frame: FrameType | None) -> None:
        # otherwise Lightning's handler has called it too
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                raise KeyboardInterrupt  # tells loggers why they are closed
            except KeyboardInterrupt:
                # A forked process, such as a worker of a pool, has inherited the handler.
                for action in actions if os.getpid() == owner else ():
                    action()
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signal.SIGTERM)
    provided = before is not signal.SIG_DFL  # by the user, or by ptdp in its own process
    if isinstance(before, HandlerOfProcess):
        provided = not before.is_inherited
    with contextlib.nullcontext() if provided else handled(signal.SIGTERM, end):
        try:
            yield
        finally:
            actions.clear()


@contextlib.contextmanager
def forwarding_ctrl_c(launcher: Launcher) -> Iterator[None]:
    """Forward Ctrl-C to the ranks while all of them are processes started by ``launcher``.

    The first Ctrl-C asks the ranks to end, as SIGTERM does. The second kills them. If they ended by
    it, or by a Ctrl-C of their own, KeyboardInterrupt is raised here.

    Raises:
        KeyboardInterrupt: Instead of the launcher's error about processes that were asked to end.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not in_main_thread():
        yield
        return
    notes = SignalNotes(_HANDED_ON)
    notes.take()
    signal.signal(signal.SIGINT, _ForwardedCtrlC(launcher, notes))
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if notes.received or getattr(error, "exit_code", None) == INTERRUPTED:
            raise KeyboardInterrupt from error
        raise
    finally:
        stop_forwarding_ctrl_c()


def stop_forwarding_ctrl_c() -> None:
    """Stop forwarding Ctrl-C, also in a rank that has inherited the handler."""
    if isinstance(signal.getsignal(signal.SIGINT), _ForwardedCtrlC):
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _ForwardedCtrlC:
    def __init__(self, launcher: Launcher, notes: SignalNotes) -> None:
        self._launcher = launcher
        self._notes = notes
        self._owner = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # A rank was just forked, or no rank has been started yet.
        if os.getpid() != self._owner or not self._launcher.procs:
            signal.default_int_handler(signum, frame)
        try:
            self._notes.note(signum, frame)
        except StoppedNow:
            self._launcher.kill(signal.SIGKILL)
            raise
        self._launcher.kill(signal.SIGTERM)


# ---- Agreement of ranks after an exception -------------------------------------------------------
#
# Callbacks save checkpoints then, which needs all ranks.


_PATIENCE_S = 5.0
_LEAVING_S = 40.0


@dataclass(eq=False)
class Interruption:
    """State of an exception in one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        trainer: Trainer whose state shows whether there was an exception.
        watchdog: Connection to the other ranks.
        run: Name of this call, the same on all ranks and used once.
        on_device: Whether unfinished messages may keep a device busy forever.
    """

    trainer: Trainer
    watchdog: Watchdog
    run: str
    on_device: bool
    _alone: bool | None = None

    def is_of_this_rank_alone(self) -> bool:
        """Return True if an exception did not end all ranks at the same step.

        Waits some seconds for the other ranks."""
        if self.trainer.state.status != "interrupted" or self.watchdog.closed:
            return False
        if self._alone is None:
            torn = self.on_device and self.watchdog.failed
            topic = f"{self.run}/{self.trainer.global_step}"
            self._alone = torn or not self.watchdog.all_arrive(topic, limit_s=_PATIENCE_S)
        return self._alone

    def leave(self) -> None:
        """Wait some seconds for the other ranks after an exception of all ranks.

        The launcher ends all ranks when one has ended, and rank 0 may still be writing its log."""
        if self._alone is False:
            self.watchdog.all_arrive(f"{self.run}/end", limit_s=_LEAVING_S)
