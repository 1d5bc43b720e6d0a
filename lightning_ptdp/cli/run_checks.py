"""Checks of a run before any process is started and any file is written."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_ptdp.base.option_types import check_writable_folder
from lightning_ptdp.callbacks.artifacts import checkpoint_dirs, mlflow_loggers
from lightning_ptdp.callbacks.step_metrics import replicas
from lightning_ptdp.checkpoint import (
    CheckpointError,
    OnDamage,
    choose_checkpoint,
    read_metadata,
    read_state,
)
from lightning_ptdp.checkpoint.latest import is_folder_of_checkpoints
from lightning_ptdp.checkpoint.local_copies import readable
from lightning_ptdp.checkpoint.remote_path import Place, is_url, located
from lightning_ptdp.cli.failures import UserError
from lightning_ptdp.data import StreamDataModule
from lightning_ptdp.exchange import open_state_dict, reads_as_huggingface, weights_opener
from lightning_ptdp.models import LitBert, LitGPT
from lightning_ptdp.models.lit_huggingface import LitHuggingFace
from lightning_ptdp.strategy.checks.trainer import check_numbers

_KEYWORDS = ("best", "last", "hpc", "registry")
_PARTS = ("metadata.json", "index.json")
_PICKLE = b"\x80"
"""First byte of a file in torch's older format."""
_SHARED_SIZES = ("vocabulary_size", "sequence_length")


def check_run(
    trainer: Trainer,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    *,
    ckpt_path: str | None,
    writes: bool,
) -> None:
    """Check that the strategy, the data and the loggers can run this configuration.

    Args:
        trainer: The Trainer, built but not started.
        model: The module, without weights if it builds them in ``configure_model``.
        datamodule: Its data, if they come from a datamodule.
        ckpt_path: Checkpoint to start from.
        writes: Whether the run writes checkpoints and logs.

    Raises:
        ValueError: The run cannot work. The message names the field, the value and what would work.
    """
    _check_sizes(model, datamodule)
    if hasattr(trainer.strategy, "check"):
        if writes:
            for reason in check_numbers(trainer.strategy, trainer):
                raise trainer.strategy.refusal(reason)
            trainer.strategy.check_processes()
        trainer.strategy.check_machine()
        trainer.strategy.check(model, datamodule)
    check_data(trainer, datamodule)
    check_checkpoint("--ckpt_path", ckpt_path, resumes=writes)
    if hasattr(trainer.strategy, "config") and model.strict_loading:
        _check_resumed(
            ckpt_path, model, on_damage=trainer.strategy.config.on_damage if writes else "refuse"
        )
    _check_port(trainer)
    if writes:
        for logger in mlflow_loggers(trainer):
            logger.check()
        _check_folders(trainer)


def check_data(trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Check that our data are prepared and sufficient, or can be prepared.

    Raises:
        DataError: The data do not meet these conditions.
    """
    if isinstance(datamodule, StreamDataModule):
        datamodule.check(num_replicas=replicas(trainer))


def check_validation_interval(trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Check that an epoch has at least as many batches as a validation interval.

    Only our own prepared data are checked.

    Raises:
        UserError: The epoch is shorter, so that no validation would take place. Lightning would
            raise the same error in the ranks.
    """
    # Lightning omits the attribute if the interval is a time
    interval = getattr(trainer, "val_check_interval", None)
    if (
        not isinstance(datamodule, StreamDataModule)
        or not isinstance(interval, int)
        or trainer.check_val_every_n_epoch is None
    ):
        return
    batches = datamodule.num_training_batches(num_replicas=replicas(trainer))
    if trainer.limit_val_batches and interval > batches:
        raise UserError(
            f"trainer.val_check_interval={interval} is longer than an epoch, which has "
            f"{batches} batches. Use {batches} or less, or count over epochs with "
            "--trainer.check_val_every_n_epoch null"
        )


def check_checkpoint(field: str, path: str | None, *, resumes: bool = False) -> None:
    """Check that a named checkpoint exists and is a checkpoint.

    A checkpoint to resume from must also have training state. Damage is left to the strategy.

    Raises:
        UserError: The path is not a checkpoint, or a checkpoint to resume from holds only weights.
    """
    if not _is_path(path):
        return
    place = located(path)
    if not place.exists():
        contents = (
            ", ".join(sorted(entry.name for entry in place.parent.iterdir())[:8])
            if place.parent.is_dir()
            else ""
        )
        raise UserError(
            f"{field} {path} does not exist"
            + (f"; {place.parent} contains {contents}" if contents else "")
        )
    if reads_as_huggingface(place):
        raise UserError(
            f"{field} {path} is a Hugging Face folder, which has only weights. Start from them "
            "with --init_from, or convert it to a checkpoint with ptdp convert"
        )
    if place.is_dir():
        if not is_folder_of_checkpoints(place) and not any(
            (place / name).exists() for name in _PARTS
        ):
            raise UserError(
                f"{field} {path} is a folder, but not a checkpoint: it has no metadata.json"
            )
    elif (
        isinstance(place, Path)
        and not zipfile.is_zipfile(place)
        and place.open("rb").read(1) != _PICKLE
    ):
        raise UserError(
            f"{field} {path} is not a checkpoint: it is neither a checkpoint folder nor a file "
            "of torch.save"
        )
    if resumes and not _has_state_of_training(place):
        raise UserError(
            f"{field} {path} has weights but no training state, so it cannot be resumed. Start "
            "a new training from it with --init_from"
        )


def check_weights(path: str, model: LightningModule) -> None:
    """Check that the weights of ``--init_from`` exist and have the model's names and shapes.

    Names and shapes are compared as far as they are known before launch.

    Raises:
        UserError: The weights do not fit. The message names one of them.
        CheckpointError: The weights are damaged.
    """
    field = "--init_from"
    place = readable(path)
    if reads_as_huggingface(place):
        tensors: Mapping[str, Any] | None = (
            weights_opener(model, {})(place).tensors
            if isinstance(model, LitGPT | LitBert)
            else None
        )
    else:
        check_checkpoint(field, path)
        if place.is_file():
            tensors = _tensors_of_file(place)
        else:
            tensors = None if is_folder_of_checkpoints(place) else read_metadata(place).tensors
    if tensors is not None:
        _check_shapes(field, path, tensors, model)


def _check_resumed(path: str | None, model: LightningModule, *, on_damage: OnDamage) -> None:
    """Compare the model with the checkpoint from which the strategy will resume.

    The checkpoint is a file, or the folder that the strategy will choose. The data files of a
    folder are only counted.

    Raises:
        UserError: The checkpoint belongs to another model.
        CheckpointError: It is incomplete, and no earlier checkpoint may replace it.
    """
    if not _is_path(path):
        return
    if located(path).is_file():
        # Lightning reads more file types, and reports their errors
        with contextlib.suppress(CheckpointError):
            _check_shapes("--ckpt_path", path, _tensors_of_file(located(path)), model)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the strategy itself warns of a damaged checkpoint
        chosen = choose_checkpoint(path, on_damage=on_damage, verify=read_metadata)
    _check_shapes("--ckpt_path", str(chosen), read_metadata(chosen).tensors, model)


def _is_path(checkpoint: str | None) -> TypeGuard[str]:
    """Return True for a file or folder, and False for nothing, a keyword or a web address."""
    return (
        checkpoint is not None and checkpoint not in _KEYWORDS and not checkpoint.startswith("http")
    )


def _tensors_of_file(file: Place) -> dict[str, Any]:
    return {f"model/{name}": value for name, value in open_state_dict(file)[0].items()}


def _check_shapes(
    field: str, path: str, tensors: Mapping[str, Any], model: LightningModule
) -> None:
    """Compare names and shapes of stored weights with those of the model.

    They are compared as far as they are known before launch.

    Raises:
        UserError: They differ.
    """
    stored_shapes = {
        name.removeprefix("model/"): entry.shape
        for name, entry in tensors.items()
        if name.startswith("model/")
    }
    model_shapes = {name: tuple(value.shape) for name, value in _on_meta(model).named_parameters()}
    missing = [name for name in model_shapes if name not in stored_shapes]
    if missing:
        raise UserError(
            f"{field} {path} has no {missing[0]!r}, which the model has; it has "
            f"{len(stored_shapes)} tensors such as {next(iter(stored_shapes), None)!r}"
        )
    for name, shape in model_shapes.items():
        if tuple(stored_shapes[name]) != shape:
            raise UserError(
                f"{field} {path}: {name!r} has the shape {tuple(stored_shapes[name])} in the "
                f"checkpoint, but {shape} in the model"
            )


def _on_meta(model: LightningModule) -> LightningModule:
    """Return the model with its parameters, on the meta device if it is one of ours.

    Our own models are not built yet at this point.
    """
    if not isinstance(model, LitGPT | LitBert):
        return model
    model = copy.deepcopy(model)
    with torch.device("meta"):
        model.configure_model()
    return model


def _has_state_of_training(place: Place) -> bool:
    """Return True if a run can continue from the file or if that cannot be determined."""
    try:
        if place.is_dir():
            return is_folder_of_checkpoints(place) or "optimizer_states" in read_state(place)
        content = torch.load(place, map_location="meta", mmap=True, weights_only=True)
    except Exception:  # the file is damaged, or has unknown classes; the loader reports it
        return True
    return isinstance(content, dict) and "optimizer_states" in content


def _check_sizes(model: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Check that sizes which the model and the data both define are compatible.

    Raises:
        UserError: A size of the model is too small for the data.
    """
    if isinstance(model, LitHuggingFace):
        model.check_data(datamodule)
    config: Any = getattr(model, "config", None)
    for name in _SHARED_SIZES:
        model_size = getattr(config, name, None)
        data_size = getattr(datamodule, name, None)
        if isinstance(model_size, int) and isinstance(data_size, int) and model_size < data_size:
            raise UserError(
                f"model.config.{name}={model_size} is smaller than data.{name}={data_size}. Use "
                f"--model.config.{name} {data_size} or --data.{name} {model_size}"
            )


def _check_port(trainer: Trainer) -> None:
    """Check that the rendezvous port of this machine's processes is free.

    Raises:
        UserError: ``MASTER_PORT`` is not a valid port, or the port is in use.
    """
    port = os.environ.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"MASTER_PORT={port} is not a port number from 1 to 65535. Unset it, or choose a "
            "free port"
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if (
        not port
        or trainer.num_nodes > 1
        or environment is None
        or environment.creates_processes_externally
    ):
        return
    try:
        socket.create_server(("127.0.0.1", int(port))).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise UserError(
            f"cannot listen at MASTER_PORT={port} ({reason}). Unset it, or choose a free port"
        ) from error


def _check_folders(trainer: Trainer) -> None:
    root = trainer.default_root_dir
    if not is_url(root):  # The strategy has checked folders in object storage.
        check_writable_folder(Path(root), f"trainer.default_root_dir={root!r}")
    for folder in checkpoint_dirs(trainer):
        if isinstance(folder, Path):
            check_writable_folder(folder, f"ModelCheckpoint.dirpath={str(folder)!r}")
