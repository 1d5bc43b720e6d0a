"""Folder of a run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer

__all__ = ["run_folder"]


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of this run, above Lightning's ``checkpoints``.

    Call it on global rank 0 only; it is not collective."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    log_dir = getattr(logger, "log_dir", None)
    if log_dir is not None:
        return Path(log_dir)
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / name
