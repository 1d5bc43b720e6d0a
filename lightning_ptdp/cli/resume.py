"""The option ``--resume auto``: the newest checkpoint of the same experiment.

The checkpoint is searched for in the folders of the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lightning_ptdp.callbacks.artifacts import checkpoint_dirs
from lightning_ptdp.checkpoint import CheckpointMetadata, complete_checkpoints, read_metadata
from lightning_ptdp.cli.experiment import Experiment, differences

__all__ = ["Found", "find_newest", "was_requeued"]

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoints in the folders of a configuration.

    Attributes:
        own: Newest checkpoint of this experiment.
        other: Newest checkpoint of any other experiment; None if ``own`` exists.
        why: Reason that ``other`` belongs to another experiment.
    """

    own: Path | None = None
    other: Path | None = None
    why: str = ""


def find_newest(
    trainer: Trainer, experiment: Experiment, *, started_from: str | None = None
) -> Found:
    """Find the newest complete checkpoint of ``experiment`` that has training state.

    Damaged checkpoints are included. The strategy reads every byte of the checkpoint that it
    continues from (``on_damage``).

    Args:
        trainer: The search covers its folders and those of its loggers and of ModelCheckpoint.
        experiment: The options that the checkpoint's run must share.
        started_from: Checkpoint from which that run must have started; None accepts any run.
    """
    saved = [logger.save_dir for logger in trainer.loggers if logger.save_dir is not None]
    roots = [trainer.default_root_dir, *saved, *checkpoint_dirs(trainer)]
    paths = {
        path.resolve()
        for root in {Path(root).resolve() for root in roots}
        for path in complete_checkpoints(root, recursive=True)
    }
    found = [(read_metadata(path), path) for path in paths]
    trained = [
        entry for entry in found if any(name.startswith("optimizer/") for name in entry[0].tensors)
    ]
    newest_first = sorted(trained, key=lambda entry: entry[0].created, reverse=True)
    reasons = {
        path: _why_not(metadata, experiment, started_from) for metadata, path in newest_first
    }
    for path, why in reasons.items():
        if not why:
            return Found(own=path)
    for path, why in reasons.items():
        return Found(other=path, why=why)
    return Found()


def was_requeued() -> bool:
    """Return True if SLURM has requeued this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _why_not(metadata: CheckpointMetadata, experiment: Experiment, started_from: str | None) -> str:
    """Return the reason that a checkpoint belongs to another experiment, or "" if it does not."""
    there = metadata.run.get("experiment")
    if not isinstance(there, Mapping):
        return "it does not name its experiment"
    names = differences(there, experiment)
    if names:
        shown = [
            f"{name} is {there.get(name)} in the checkpoint, but {experiment.get(name)} in "
            "this experiment"
            for name in names[:_SHOWN]
        ]
        more = [f"{len(names) - _SHOWN} more differ"] if len(names) > _SHOWN else []
        return "; ".join([*shown, *more])
    if started_from is not None and metadata.run.get("started_from") != started_from:
        return f"its run did not start from {started_from}"
    return ""
