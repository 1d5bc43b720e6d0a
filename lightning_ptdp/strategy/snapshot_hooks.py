"""Hooks of the strategy that take snapshots in memory, and continue from them."""

from __future__ import annotations

from pathlib import Path

from lightning_ptdp.callbacks.artifacts import checkpoint_dirs
from lightning_ptdp.checkpoint.memory_folders import LINK, MemoryFolder, in_memory
from lightning_ptdp.shims.lightning import Trainer, dump_checkpoint
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.snapshots import Snapshots, fetch_snapshot


class SnapshotHooks(CheckpointHooks):
    """Layer of the strategy: snapshots after optimizer steps (``snapshot_every_n_steps``)."""

    _snapshots: Snapshots | None = None
    _snapshot_callback: object = None
    _last_snapshot = -1
    _continued: MemoryFolder | None = None

    def start_snapshots(self, trainer: Trainer) -> None:
        """Let ``trainer`` take a snapshot after the optimizer steps that the option names."""
        others = [one for one in trainer.callbacks if one is not self._snapshot_callback]
        trainer.callbacks[:] = others
        self._snapshots, self._last_snapshot = None, trainer.global_step
        if self.config.snapshot_every_n_steps is not None:
            self._snapshot_callback = self._names.LambdaCallback(on_train_batch_end=self._snapshot)
            trainer.callbacks.append(self._snapshot_callback)

    def _snapshot(self, trainer: Trainer, *_: object) -> None:
        every, step = self.config.snapshot_every_n_steps, trainer.global_step
        if every is None or step % every or step == self._last_snapshot:
            return  # the batch did not end with an optimizer step
        self._last_snapshot = step
        with self.waiting_in(f"taking a snapshot of step {step}"):
            if self._snapshots is None:
                self._snapshots = Snapshots(
                    Path([*checkpoint_dirs(trainer), trainer.default_root_dir][0]),
                    ranks_per_node=self.num_processes,
                    limit=self.config.timeout,
                    keeper=self._saves.keeper,
                    continued=self._continued,
                )
            self._snapshots.take(self.model_space, dump_checkpoint(trainer), facts=self.run_facts)

    def remove_snapshots(self) -> None:
        """Remove the snapshots of a training that has ended normally."""
        if self._snapshots is not None:
            self._snapshots.remove()
        elif self._continued is not None and self.local_rank == 0:
            self._continued.remove(linked=self.is_global_zero)
        self._snapshots = self._continued = None

    def on_exception(self, exception: BaseException) -> None:
        """Complete the current snapshot, if it can end, and keep it."""
        super().on_exception(exception)
        if self._snapshots is not None:
            self._snapshots.keep(exception)
        self._snapshots = self._continued = None

    def _located(self, path: Path, *, resuming: bool) -> Path:
        place = None
        if in_memory(path):
            with self.waiting_in(f"looking for the snapshots of {path}"):
                path, place = fetch_snapshot(
                    path, ranks_per_node=self.num_processes, limit=self.config.timeout
                )
        elif in_memory(link := path.parent / LINK):
            place = MemoryFolder.of(link)  # older than the checkpoint on the disk
        self._continued = place if resuming else None
        return path
