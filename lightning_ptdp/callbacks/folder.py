"""Where the files of a run go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

__all__ = ["keep_with_run", "run_folder"]


def run_folder(trainer: Trainer) -> Path:
    """The folder of this run, above Lightning's ``checkpoints``; call it on global rank 0 only, it is not collective."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    log_dir = getattr(logger, "log_dir", None)
    if log_dir is not None:
        return Path(log_dir)
    version = logger.version
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / name


def keep_with_run(logger: Logger, files: Sequence[Path], *, folder: str) -> None:
    """Store the files, in ``folder`` of its artifacts, if the logger is one that stores files: MLflow's, whether ours or Lightning's."""
    if not hasattr(logger, "run_id") or not hasattr(logger.experiment, "log_artifact"):
        return
    try:
        for file in files:
            logger.experiment.log_artifact(logger.run_id, str(file), folder)
    except Exception as error:
        rank_zero_warn(f"{files[0].name} could not be stored with the run, it is in {files[0].parent}: {error}")
