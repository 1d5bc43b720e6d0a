"""Instants at which the fault campaign kills a process, and the traps that wait for them.

A trap replaces functions only in the process to be lost. It counts their calls from a given step
on, and then sends a signal to the process:

- SIGKILL, like the kernel when memory is short. Nothing is flushed, closed or reported.
- SIGSTOP. The process still exists but does nothing, as if a file system or a device had stopped
  responding."""

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
        calls: Functions that contain the instant, as "module:attribute". If there are none, the
            campaign sends the signal after a random time instead.
        most: Number of first calls, in one of which the process is lost.
        anyone: Whether any rank may be lost; otherwise rank 0 is lost, which alone writes the parts
            that are written once.
        saves: "" if the kind does not depend on a save; "while": during a save that blocks
            training; "beside": during a save in the background.
        armed: Start of the count of calls: "step" (beginning of the chosen step), "start" (of the
            process), "saving" (calls during a background save) or "validation" (calls during
            validation, from the chosen step on).
        node: All ranks of a node are lost at once, together with the memory of the node.
        alone: The process has not yet announced itself to other ranks. Its loss is detected only by
            the time limit.
    """

    calls: tuple[str, ...] = ()
    most: int = 1
    anyone: bool = True
    saves: str = ""
    armed: str = "step"
    alone: bool = False
    node: bool = False


_WRITE = ("lightning_ptdp.checkpoint.checksums:SummingFile.write",)
_METADATA = (
    "lightning_ptdp.checkpoint.save:encode_index",
    "lightning_ptdp.checkpoint.save_folders:write_metadata",
)
_RENAME = ("os:rename",)
_LATEST = ("os:symlink", "os:replace")
# the latter for mixtures of experts
_FORWARD = (
    "lightning_ptdp.models.gpt:Block.forward",
    "torch.distributed:all_to_all_single",
)

KINDS = {
    "absent": Kind(
        calls=("lightning_ptdp.strategy.world:rendezvous_store",), armed="start", alone=True
    ),
    "joining": Kind(
        calls=(
            "torch.distributed:init_process_group",
            "lightning_ptdp.world.mesh:ProcessMesh.create",
        ),
        most=2,
        armed="start",
    ),
    "setup": Kind(calls=("lightning_ptdp.strategy.setup_hooks:parallelize",), armed="start"),
    "data": Kind(calls=("fault_campaign.training:Tokens.__getitems__",), most=2),
    "validation": Kind(calls=_FORWARD, most=8, armed="validation"),
    "load": Kind(
        calls=("lightning_ptdp.checkpoint.stored_tensor:read_rectangle",), most=30, armed="start"
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
    "node": Kind(node=True),
    "node: async": Kind(node=True, saves="beside"),
}


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Loss of this process before or after a call of the kind's functions.

    Attributes:
        kind: A key of ``KINDS``.
        fault: A key of ``FAULTS``.
        note: File that receives the time of the loss, as ``time.monotonic``.
        victim: Global rank that is lost.
        step: Optimizer step. Calls count from its beginning on.
        call: Number of the call, from 1.
        behind: Whether the call completes before the loss.
    """

    kind: str
    fault: str
    note: Path
    victim: int
    step: int
    call: int
    behind: bool


class TrapCallback(pl.Callback):
    """Callback that arms a trap at the beginning of its step."""

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
        """Return ``function`` with the trap before or after it."""

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
    """Replace the functions of the trap's kind in this process, permanently.

    Pass the returned callback to the Trainer."""
    callback = TrapCallback(trap)
    for call in KINDS[trap.kind].calls:
        module, _, path = call.partition(":")
        if module == "parameters":
            continue
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, callback.wrap(getattr(owner, name)))
    return callback
