"""Instants at which the fault campaign kills a process, and the traps that wait for them.

A trap replaces functions in the process that is to be lost, and in no other. It counts their calls
from a given step on, and then sends the
process a signal: SIGKILL, as the kernel does when memory is short (nothing is flushed, closed or
told to anybody), or SIGSTOP, after which it is there and does nothing, as where a file system or a
device has stopped to answer."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

__all__ = ["FAULTS", "KINDS", "Kind", "Trap", "TrapCallback", "set_trap"]

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of instant.

    Attributes:
        calls: The functions in which it lies, as "module:attribute"; none: the campaign sends the
            signal after a random time instead.
        most: The process is lost in one of the first so many calls.
        anyone: Whether any rank may be the one; otherwise rank 0, which alone writes what is
            written once.
        saves: "" if it does not depend on a save; "while" one goes on in front of training,
            "beside" training in the background.
        armed: From when on calls count: "step" (the beginning of the chosen step), "start" (of the
            process), "saving" (calls while a save goes on in the background) or "validation" (calls
            while the model is validated, from the chosen step on).
        alone: The process has not told anybody yet that it is there: that it is lost can only be
            known from the limit.
    """

    calls: tuple[str, ...] = ()
    most: int = 1
    anyone: bool = True
    saves: str = ""
    armed: str = "step"
    alone: bool = False


_WRITE = (
    "lightning_ptdp.checkpoint.checksums:SummingFile.write",
    "lightning_ptdp.checkpoint.checksums:SummingFile.write_blocks",
)
_METADATA = (
    "lightning_ptdp.checkpoint.save:write_index",
    "lightning_ptdp.checkpoint.save:write_metadata",
)
_RENAME = ("os:rename",)
_LATEST = ("os:symlink", "os:replace")
_FORWARD = (
    "lightning_ptdp.models.gpt:Block.forward",
    "torch.distributed:all_to_all_single",
)  # the latter where there are experts

KINDS = {
    "absent": Kind(
        calls=("lightning_ptdp.strategy.world:meeting_store",), armed="start", alone=True
    ),
    "joining": Kind(
        calls=(
            "torch.distributed:init_process_group",
            "lightning_ptdp.world.mesh:ProcessMesh.create",
        ),
        most=2,
        armed="start",
    ),
    "setup": Kind(calls=("lightning_ptdp.strategy.ptdp:parallelize",), armed="start"),
    "data": Kind(calls=("fault_campaign.training:Tokens.__getitems__",), most=2),
    "validation": Kind(calls=_FORWARD, most=8, armed="validation"),
    "load": Kind(
        calls=("lightning_ptdp.checkpoint.reader:read_rectangle",), most=30, armed="start"
    ),
    "forward": Kind(calls=_FORWARD, most=8),
    "backward": Kind(calls=("parameters:gradient",), most=12),
    "reduction": Kind(
        calls=(
            "torch.distributed:all_reduce",
            "lightning_ptdp.data_parallel.reduction:start_reduce_scatter",
            "lightning_ptdp.data_parallel.reduction:start_all_gather",
        ),
        most=4,
    ),
    "optimizer": Kind(calls=("torch.optim.adam:adam",), most=2),
    "save: blocks": Kind(calls=_WRITE, most=60, saves="while"),
    "save: fsync": Kind(calls=("os:fsync",), most=3, saves="while"),
    "save: metadata": Kind(calls=_METADATA, most=4, anyone=False, saves="while"),
    "save: renames": Kind(calls=_RENAME, most=5, anyone=False, saves="while"),
    "save: latest": Kind(calls=_LATEST, most=10, anyone=False, saves="while"),
    "save: removal": Kind(calls=("os:unlink", "os:rmdir"), most=12, anyone=False, saves="while"),
    "async: copy": Kind(
        calls=("lightning_ptdp.checkpoint.background:rectangles_of",), most=2, saves="beside"
    ),
    "async: blocks": Kind(calls=_WRITE, most=60, saves="beside"),
    "async: training": Kind(calls=_FORWARD, most=4, saves="beside", armed="saving"),
    "async: renames": Kind(calls=_RENAME, most=5, anyone=False, saves="beside"),
    "async: latest": Kind(calls=_LATEST, most=10, anyone=False, saves="beside"),
    "any time": Kind(),
    "any time: async": Kind(saves="beside"),
}


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Lose this process in call number ``call`` (from 1) of the kind's functions, before or behind
    what they do.

    Attributes:
        kind: A key of ``KINDS``.
        fault: A key of ``FAULTS``.
        note: The file in which the time of it is left, as ``time.monotonic``.
        victim: Global rank.
        step: Optimizer step from whose beginning on calls count.
        call: Which call.
        behind: Let the call do what it does first.
    """

    kind: str
    fault: str
    note: Path
    victim: int
    step: int
    call: int
    behind: bool


class TrapCallback(pl.Callback):
    """Arms a trap at the beginning of its step."""

    def __init__(self, trap: Trap) -> None:
        self._trap, self._left = trap, trap.call
        self._armed = KINDS[trap.kind].armed == "start"
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self._armed or trainer.global_step < self._trap.step:
            return
        self._armed = True
        if KINDS[self._trap.kind].calls == ("parameters:gradient",):
            for parameter in pl_module.parameters():
                parameter.register_hook(self._gradient)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with the trap before or behind it."""

        @functools.wraps(function)
        def trapped(*args: Any, **kwargs: Any) -> Any:
            if not self._trap.behind:
                self._count()
                return function(*args, **kwargs)
            result = function(*args, **kwargs)
            self._count()
            return result

        return trapped

    def _gradient(self, gradient: Any) -> None:
        self._count()

    def _count(self) -> None:
        if not self._armed or not self._is_time():
            return
        self._left -= 1
        if self._left == 0:
            self._trap.note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), FAULTS[self._trap.fault])

    def _is_time(self) -> bool:
        armed = KINDS[self._trap.kind].armed
        if armed == "saving":
            return any(thread.name.startswith("save ") for thread in threading.enumerate())
        return armed != "validation" or (self._trainer is not None and self._trainer.validating)


def set_trap(trap: Trap) -> TrapCallback:
    """Replace the functions of the trap's kind in this process, for good; the callback belongs into
    the Trainer."""
    callback = TrapCallback(trap)
    for call in KINDS[trap.kind].calls:
        module, _, path = call.partition(":")
        if module == "parameters":
            continue
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, callback.wrap(getattr(owner, name)))
    return callback
