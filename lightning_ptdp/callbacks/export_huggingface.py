"""Callback that exports the trained model as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ptdp.base.option_types import Size, check_arguments, check_writable_folder
from lightning_ptdp.callbacks.artifacts import hyperparameters, mlflow_loggers
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.local_copies import readable
from lightning_ptdp.checkpoint.remote_path import Place, located
from lightning_ptdp.loggers import MLFlowLogger
from lightning_ptdp.loggers.mlflow_entities import log_folder

When = Literal["end", "checkpoint"]
Dtype = Literal["float32", "bfloat16", "float16"]


class ExportHuggingFace(pl.Callback):
    """Callback that writes the trained model as a Hugging Face folder.

    ``from_pretrained`` and servers of such folders can load it. All ranks write together, each its
    own part.

    Needs the "ptdp" strategy, and a module that wraps a Hugging Face model or is a model of this
    package. The weights are those of a checkpoint; LoRA adapters are merged into the weights that
    they adapt. The folder also contains ``config.json``, ``generation_config.json``,
    and the tokenizer and chat template of the data, or of the folder from which the model's
    configuration was read. A model that cannot be exported is an error before the first step.

    Args:
        folder: The folder to make, on a file system that all ranks share; an earlier export there
            is replaced when the new one is complete. It may be an address (``s3://``); an earlier
            export there is removed before the new one is sent.
        when: ``"end"``: at the end of a fit that ends well. ``"checkpoint"``: also after each saved
            checkpoint, if training continues; all exports are then named ``folder/step-NUMBER``,
            including the last one, and are kept.
        dtype: Type to which floating-point tensors are converted; default: unchanged.
        shard_bytes: Largest number of tensor bytes in one file.
        prefix: Attribute of the model to export, with a trailing dot, if the module holds several
            Hugging Face models.
        log_model: Also copy each export to the artifacts of the run of every ``MLFlowLogger``, as a
            model that ``mlflow.transformers.load_model`` loads.

    Raises:
        CheckpointError: (when fit begins, or when it is written) The model or the folder cannot be
            used.
    """

    # to_huggingface can then repeat an export from each checkpoint
    needs_checkpoint_folders = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        when: When = "end",
        dtype: Dtype | None = None,
        shard_bytes: Size = 5_000_000_000,
        prefix: str | None = None,
        log_model: bool = False,
    ) -> None:
        arguments = {"when": when, "dtype": dtype, "shard_bytes": shard_bytes}
        check_arguments(ExportHuggingFace.__init__, arguments)
        if when == "end":
            files.check_replaceable(folder, marker=files.EXPORT_MARK)
        self._folder = os.fspath(folder)
        self._when = when
        self._options = {
            "dtype": dtype and getattr(torch, dtype),
            "shard_bytes": shard_bytes,
            "prefix": prefix,
        }
        self._last = -1
        self._is_due = False
        self._log_model = log_model

    def check(self, trainer: pl.Trainer, read: Iterable[object]) -> None:
        """Check the loggers, and the folder against the files that the run reads.

        Args:
            trainer: The Trainer of the run.
            read: Values of the run's options. Those that are paths, alone or in lists and mappings,
                are read.

        Raises:
            ValueError: The folder cannot be made, the export would change a file or folder that the
                run reads, or there is no logger that could log the model.
        """
        if self._log_model and not mlflow_loggers(trainer):
            raise ValueError(
                "log_model=True needs an MLFlowLogger of lightning_ptdp.loggers. Add it to the "
                "Trainer, or leave log_model out"
            )
        folder = files.absolute(self._folder)
        if isinstance(folder, Path):
            check_writable_folder(folder.parent, f"export folder {self._folder}")
        files.check_apart(self._folder, files.existing_paths(list(read)), what="export folder")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse an export that could not be written at the end."""
        options = hyperparameters(pl_module, getattr(trainer, "datamodule", None))
        self.check(trainer, [options, trainer.ckpt_path])
        if not hasattr(trainer.strategy, "export_huggingface"):
            raise ValueError(
                'ExportHuggingFace needs Trainer(strategy="ptdp"), not '
                f"{type(trainer.strategy).__name__}"
            )
        self._last = -1
        self._is_due = False
        self._export(trainer, check_only=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark the export as due; it is written later.

        A run that was asked to end has time only for its checkpoint."""
        self._is_due = (
            self._when == "checkpoint"
            and trainer.state.fn == TrainerFn.FITTING
            and self._last != trainer.global_step
        )

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Write the export of the weights that were saved, before they change."""
        if self._is_due:
            self._export(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the export after all other callbacks have changed the weights."""
        if not (
            trainer.fast_dev_run
            or (self._when == "checkpoint" and self._last == trainer.global_step)
        ):
            self._export(trainer)

    def _export(self, trainer: pl.Trainer, *, check_only: bool = False) -> None:
        strategy = trainer.strategy
        folder = located(self._folder)
        if self._when == "checkpoint":
            folder = folder / f"step-{trainer.global_step}"
        strategy.export_huggingface(folder, **self._options, check_only=check_only)
        if not check_only:
            self._last = trainer.global_step
            self._is_due = False
            rank_zero_info(f"exported:    {files.absolute(folder)}")
            if self._log_model and trainer.is_global_zero:
                for logger in mlflow_loggers(trainer):
                    _log(logger, folder)


def _log(logger: MLFlowLogger, folder: Place) -> None:
    """Log the export; a failure is a warning, because the folder remains."""
    try:
        copy = readable(folder)
        call = log_folder(copy, tracking_uri=logger.tracking_uri, run_id=logger.run_id)
        if isinstance(copy, Path) and copy != folder:
            files.remove(copy)
        rank_zero_info(f"logged:      {call}")
    except Exception as error:
        rank_zero_warn(f"{folder} could not be logged to MLflow: {error}")
