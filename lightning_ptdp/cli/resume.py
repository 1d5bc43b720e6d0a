"""The option ``--resume auto``: the newest checkpoint of the same experiment.

The checkpoint is searched for in the folders of the configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lightning_ptdp.base.errors import listed
from lightning_ptdp.callbacks.artifacts import checkpoint_dirs
from lightning_ptdp.checkpoint import CheckpointMetadata, complete_checkpoints, read_metadata
from lightning_ptdp.checkpoint.memory_folders import newest_first
from lightning_ptdp.checkpoint.remote_path import Place, is_url, located
from lightning_ptdp.cli.config_files import leaves, short, value_at
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.data.stream_datamodule import StreamDataModule

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoints in the folders of a configuration.

    Attributes:
        own: Newest checkpoint of this experiment.
        other: Newest checkpoint of any other experiment; None if ``own`` exists.
        why: Reason that ``other`` belongs to another experiment.
    """

    own: Place | None = None
    other: Place | None = None
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
    found = Found()
    for metadata, path in _newest_first(_folders(trainer)):
        if not any(name.startswith("optimizer/") for name in metadata.tensors):
            continue
        reason = _why_not(metadata, experiment, started_from)
        if not reason:
            return Found(own=path)
        if found.other is None:
            found = Found(other=path, why=reason)
    return found


def last_checkpoint(trainer: Trainer) -> str:
    """Return the newest checkpoint in the folders that ``find_newest`` searches.

    Raises:
        UserError: There is none.
    """
    folders = _folders(trainer)
    for _, path in _newest_first(folders):
        return os.fspath(path)
    for folder in checkpoint_dirs(trainer):
        if not is_url(folder) and any(Path(folder).glob("last*.ckpt")):
            return "last"  # Lightning's single file
    raise UserError(
        f"--ckpt_path last: there is no checkpoint in {', '.join(sorted(map(str, folders)))}. Give "
        "its path, or leave --ckpt_path out"
    )


def _folders(trainer: Trainer) -> set[Place]:
    saved = [logger.save_dir for logger in trainer.loggers if logger.save_dir is not None]
    roots = [trainer.default_root_dir, *saved, *checkpoint_dirs(trainer)]
    return {located(root).resolve() for root in roots}


def _newest_first(folders: Iterable[Place]) -> list[tuple[CheckpointMetadata, Place]]:
    paths = {
        path if path.is_symlink() else path.resolve()
        for folder in folders
        for path in newest_first(folder)
    }
    entries = [(metadata, path) for path in paths if (metadata := _metadata(path)) is not None]
    return sorted(entries, key=lambda entry: entry[0].created, reverse=True)


def _metadata(path: Place) -> CheckpointMetadata | None:
    """Return a checkpoint's metadata; for lost snapshots, that of another one in the folder."""
    checkpoints = [path] if path.is_dir() else complete_checkpoints(path.parent)
    return read_metadata(checkpoints[0]) if checkpoints else None


def was_requeued() -> bool:
    """Return True if SLURM has requeued this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _why_not(metadata: CheckpointMetadata, experiment: Experiment, started_from: str | None) -> str:
    """Return the reason that a checkpoint belongs to another experiment, or "" if it does not."""
    stored = metadata.run.get("experiment")
    if not isinstance(stored, Mapping):
        return "it does not name its experiment"
    names = differences(stored, experiment)
    if names:
        details = [
            f"{name} is {stored.get(name)} in the checkpoint, but {experiment.get(name)} in "
            "this experiment"
            for name in names
        ]
        return listed(details, _SHOWN, "; ")
    if started_from is not None and metadata.run.get("started_from") != started_from:
        return f"its run did not start from {started_from}"
    return ""


# ---- Identity of an experiment: the options that a run and its continuation must share -----------


Experiment = dict[str, str]
"""Command-line name of each option -> its value as JSON."""

_SECTIONS = ("seed_everything", "model", "data", "init_from")
_TRAINER = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "overfit_batches",
)
_STRATEGY = ("seed", "fp8")
_BATCH = ("samples per step", "samples per step and replica")
_NOT_IDENTIFYING = frozenset(
    {
        "model.loss_chunk_mb",
        "data.num_workers",
        "data.overwrite",
        "data.prepare_workers",
        "data.validation_samples",
        "data.verify_hashes",
    }
)
_BATCH_OPTIONS = frozenset(
    {"data.global_batch_size", "data.micro_batch_size", "data.num_microbatches"}
)


def experiment_of(
    values: Mapping[str, Any], datamodule: LightningDataModule | None, *, num_replicas: int
) -> Experiment:
    """Return the options that identify the experiment of a resolved configuration.

    Layout, devices, length of the training, logging and output are left out, because a continued
    run may change them.

    Args:
        values: The configuration with every default filled in.
        datamodule: The data module built from it.
        num_replicas: Number of replicas of its layout.
    """
    options = values["trainer"]
    strategy = options["strategy"] if isinstance(options["strategy"], Mapping) else {}
    chosen: dict[str, Any] = {name: values.get(name) for name in _SECTIONS}
    chosen["trainer"] = {name: options[name] for name in _TRAINER}
    chosen["trainer"]["strategy"] = {
        name: strategy.get("init_args", {}).get(name) for name in _STRATEGY
    }
    identity = {}
    for path in leaves(chosen):
        value = value_at(chosen, path)
        name = ".".join(map(str, short(path)))
        if value is not None and name not in _NOT_IDENTIFYING:
            identity[name] = _as_json(value)
    if isinstance(datamodule, StreamDataModule):
        plan = datamodule.batch_plans(num_replicas=num_replicas)[-1]
        identity = {name: value for name, value in identity.items() if name not in _BATCH_OPTIONS}
        identity |= dict(
            zip(_BATCH, (_as_json(plan.global_batch), _as_json(plan.replica_batch)), strict=True)
        )
    return identity


def differences(there: Mapping[str, Any], here: Experiment) -> list[str]:
    """Return the names of the options in which two experiments differ.

    If the number of replicas differs, either the batch of a step or the batch of a replica may
    differ.
    """
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if all(name in differing for name in _BATCH):
        return differing
    return [name for name in differing if name not in _BATCH]


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
