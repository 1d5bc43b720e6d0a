"""Everything that can be found wrong before a process is started or a file is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.cli.errors import UserError
from lightning_ptdp.data import StreamDataModule
from lightning_ptdp.loggers.store import check_writable_folder

__all__ = ["check_checkpoint", "check_data", "check_run"]

_KEYWORDS = ("best", "last", "hpc", "registry")
_SHARED_SIZES = ("vocabulary_size", "sequence_length")


def check_run(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule | None, *, ckpt_path: str | None, writes: bool
) -> None:
    """Ask the strategy, the data and the loggers whether this run can work.

    Args:
        trainer: Built, not started.
        model: The module, without weights if it builds them in ``configure_model``.
        datamodule: Its data, if it comes from a datamodule.
        ckpt_path: Checkpoint to start from.
        writes: Whether the run writes checkpoints and logs.

    Raises:
        ValueError: Names the field, the value and what would work.
    """
    _check_sizes(model, datamodule)
    if hasattr(trainer.strategy, "check"):
        trainer.strategy.check(model, datamodule)
    check_data(trainer, datamodule)
    check_checkpoint("--ckpt_path", ckpt_path)
    if writes:
        for logger in trainer.loggers:
            if hasattr(logger, "check"):
                logger.check()
        _check_folders(trainer)


def check_data(trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Whether our data can be prepared, or are there and suffice.

    Raises:
        DataError: They cannot, or do not.
    """
    if isinstance(datamodule, StreamDataModule):
        layout = getattr(trainer.strategy, "layout", None)
        datamodule.check(num_replicas=1 if layout is None else layout.num_replicas)


def check_checkpoint(field: str, path: str | None) -> None:
    """A checkpoint that is named must exist.

    Raises:
        UserError: There is nothing at ``path``.
    """
    if path is None or path in _KEYWORDS or "://" in path or os.path.exists(path):
        return
    parent = Path(path).parent
    there = ", ".join(sorted(entry.name for entry in parent.iterdir())[:8]) if parent.is_dir() else ""
    raise UserError(f"{field} {path}: there is no such checkpoint" + (f"; in {parent} there is {there}" if there else ""))


def _check_sizes(model: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Sizes that the model and the data both state must agree.

    Raises:
        UserError: They differ.
    """
    config: Any = getattr(model, "config", None)
    for name in _SHARED_SIZES:
        wanted, offered = getattr(config, name, None), getattr(datamodule, name, None)
        if isinstance(wanted, int) and isinstance(offered, int) and wanted < offered:
            raise UserError(
                f"model.config.{name}={wanted} is smaller than data.{name}={offered}; set --model.config.{name} {offered} or "
                f"--data.{name} {wanted}"
            )


def _check_folders(trainer: Trainer) -> None:
    check_writable_folder(Path(trainer.default_root_dir), f"trainer.default_root_dir={trainer.default_root_dir!r}")
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            check_writable_folder(Path(callback.dirpath), f"ModelCheckpoint.dirpath={str(callback.dirpath)!r}")
