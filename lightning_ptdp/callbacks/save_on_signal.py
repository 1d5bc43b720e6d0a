"""Callback that saves a checkpoint when a signal ends the run.

The signals are Ctrl-C, SIGTERM, and SLURM's signal before pre-emption."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ptdp.base.signals import HeldSignal, SignalNotes
from lightning_ptdp.callbacks.artifacts import checkpoint_dirs, model_checkpoints
from lightning_ptdp.checkpoint import CheckpointError, CheckpointMetadata, read_metadata
from lightning_ptdp.checkpoint.remote_path import located
from lightning_ptdp.shims.lightning import requeue_handler

_ENDS = (signal.SIGINT, signal.SIGTERM)
_ANNOUNCEMENT = "Ctrl-C: training saves after this step and ends. Press it again to end now"
_REQUEUED = "hpc_ckpt_*.ckpt"  # Lightning's names, in default_root_dir


class SaveOnSignal(pl.Callback):
    """Callback that ends all ranks with a checkpoint after Ctrl-C or SIGTERM to any rank.

    The ranks finish their current step, save, print the path, and end. Lightning's own handler of
    SIGTERM communicates with the other ranks from inside the signal handler, at an arbitrary point,
    and Ctrl-C raises there. Here a handler only sets a flag. The ranks compare flags after every
    step, over a separate group and one step late, so that no rank waits. The second Ctrl-C ends the
    ranks immediately.

    SLURM sends a signal before it ends a job. Lightning's handler of this signal saves and requeues
    the job. This signal is deferred to the same point. If it arrives while ``ptdp`` is starting, it
    is handled after the first steps. Under the ptdp strategy its checkpoint is removed when the run
    has a newer one.

    Args:
        name: Name of the checkpoint, in the folder of ModelCheckpoint, or else in
            ``default_root_dir``.

    Raises:
        SIGTERMException: (after the save) From the hook that runs after a step; Lightning then
            closes everything.
        KeyboardInterrupt: (after the save) Likewise.
    """

    needs_checkpoint_folders = True  # their metadata contain the run and the time

    def __init__(self, name: str = "on_signal.ckpt") -> None:
        self._name = name
        self._notes = SignalNotes()
        self._before: dict[int, Any] = {}
        self._after: dict[int, Any] = {}
        self._left: set[Path] = set()
        self._group: Any = None
        self._world: Any = None  # default group at the time of its creation
        self._pending: tuple[Any, torch.Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the handling of the signals from Lightning."""
        self._join(trainer)
        numbers = _signals(trainer)
        self._before = {number: signal.getsignal(number) for number in numbers}
        self._notes = SignalNotes(_ANNOUNCEMENT if trainer.is_global_zero else "")
        self._notes.take(*numbers)
        for number, handler in self._before.items():
            if isinstance(handler, HeldSignal):
                self._after[number] = requeue_handler(trainer)
                if handler.received:
                    self._notes.received.add(number)
        self._before |= self._after
        self._left = {Path(trainer.ckpt_path).resolve()} if trainer.ckpt_path else set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Read the flags of the previous step, and exchange the current flags."""
        numbers = _signals(trainer)
        agreed = self._agreed()
        flags = torch.tensor([int(number in self._notes.received) for number in numbers])
        work = None
        if self._group is not None:
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, flags)
        if agreed is None or not agreed.any():
            return
        self._agreed()
        received = [number for number, flag in zip(numbers, agreed.tolist(), strict=True) if flag]
        for number in received:
            if number not in _ENDS:
                self._notes.received.discard(number)
                self._requeue(trainer, number)
        if signal.SIGINT in received:
            self._save(trainer, "Ctrl-C")
            raise KeyboardInterrupt
        if signal.SIGTERM in received:
            self._save(trainer, "SIGTERM")
            raise SIGTERMException

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers."""
        self._agreed()
        self._close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the checkpoints of earlier signals."""
        self._remove_superseded(trainer)

    def on_exception(self, trainer: pl.Trainer, *_: object) -> None:
        """Restore the signal handlers.

        If SIGTERM arrived and no step has ended since, the launcher is notified."""
        if signal.SIGTERM in self._notes.received and hasattr(trainer.strategy, "stop_requested"):
            trainer.strategy.run.stop_request.received = True
        self._close()
        self._world = None  # a rank may not have joined the last exchange

    def __reduce__(self) -> tuple[type[SaveOnSignal], tuple[str]]:
        """Return the arguments of a copy, because handlers and groups cannot be copied."""
        return type(self), (self._name,)

    def _join(self, trainer: pl.Trainer) -> None:
        """Create the group, or keep that of an earlier fit."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            self._group = None
        elif world is not self._world:
            # An old group stays: torch before 2.15 names groups by the number of those that exist.
            limit = getattr(getattr(trainer.strategy, "config", None), "timeout", None)
            self._group = dist.new_group(backend="gloo", timeout=limit)
        self._world = world

    def _agreed(self) -> torch.Tensor | None:
        pending = self._pending
        self._pending = None
        if pending is None:
            return None
        work, flags = pending
        if work is not None:
            work.wait()
        return flags

    def _requeue(self, trainer: pl.Trainer, number: int) -> None:
        """Let Lightning save and put the job back into the queue."""
        # Save in the foreground from now on: SLURM ends the job as soon as it is in the queue.
        _finish_saving(trainer)
        before = _requeued(trainer)
        self._before[number](number, None)
        self._left |= _requeued(trainer) - before
        self._remove_superseded(trainer)

    def _remove_superseded(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        if not hasattr(strategy, "run_facts"):
            return
        _finish_saving(trainer)
        if not trainer.is_global_zero:
            return
        saved = {
            path
            for saver in model_checkpoints(trainer)
            for path in (saver.last_model_path, saver.best_model_path, *saver.best_k_models)
            if path
        }
        started_from = strategy.run_facts.get("started_from")
        requeued = _requeued(trainer) - {Path(started_from).resolve() if started_from else None}
        experiment = strategy.run_facts.get("experiment")
        for path in superseded(
            requeued, saved=map(Path, saved), own=self._left, experiment=experiment
        ):
            strategy.remove_checkpoint(path)

    def _save(self, trainer: pl.Trainer, reason: str) -> None:
        path = next(iter(checkpoint_dirs(trainer)), located(trainer.default_root_dir)) / self._name
        rank_zero_info(f"{reason}: saving {path}")
        trainer.save_checkpoint(str(path))
        _finish_saving(trainer)
        rank_zero_info(f"{reason}: saved {path}. To resume, use fit(..., ckpt_path=...)")

    def _close(self) -> None:
        self._pending = None  # not awaited: after an exception a rank may be lost
        self._notes.give_back()
        for number, handler in self._after.items():
            signal.signal(number, handler)
        self._after = {}


def superseded(
    found: Iterable[Path],
    *,
    saved: Iterable[Path],
    own: Collection[Path],
    experiment: object | None,
) -> list[Path]:
    """Return the checkpoints of this run that are older than its newest.

    Args:
        found: Checkpoints saved for a requeue, including those of other runs in the same folder.
        saved: Other checkpoints of this run.
        own: Checkpoints that are known to belong to this run.
        experiment: Experiment named in checkpoints of this run; None if they name none.
    """
    times = [other.created for path in saved if (other := _metadata(path)) is not None]
    candidates = {}
    for path in found:
        metadata = _metadata(path)
        if metadata is None:
            continue
        is_stated = experiment is not None and metadata.run.get("experiment") == experiment
        if path in own or is_stated:
            candidates[path] = metadata.created
    newest = max([*times, *candidates.values()], default=0.0)
    return [path for path, created in candidates.items() if created < newest]


def _metadata(path: Path) -> CheckpointMetadata | None:
    try:
        return read_metadata(path)
    except CheckpointError:
        return None


def _finish_saving(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    if hasattr(strategy, "finish_saving"):
        strategy.finish_saving()


def _requeued(trainer: pl.Trainer) -> set[Path]:
    return {path.resolve() for path in Path(trainer.default_root_dir).glob(_REQUEUED)}


def _signals(trainer: pl.Trainer) -> tuple[int, ...]:
    """Return the signals that end a run, and the one for requeueing.

    After the latter Lightning saves and asks SLURM to run the job again."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    if not getattr(environment, "auto_requeue", False) or not hasattr(
        environment, "requeue_signal"
    ):
        return _ENDS
    return (*_ENDS, int(environment.requeue_signal or signal.SIGUSR1))
