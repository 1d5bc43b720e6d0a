"""Callbacks at the start of a run: initial weights, and descriptions of its layout and datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.data_record import records_of
from lightning_ptdp.base.output import say
from lightning_ptdp.callbacks.artifacts import store_tags, store_text
from lightning_ptdp.callbacks.run_summary import StrategySummary, render
from lightning_ptdp.loggers import MLFlowLogger


class LayoutSummary(Callback):
    """Callback that prints the strategy's layout once, on global rank 0.

    The run keeps the layout as tags, as ``layout.txt`` and, below the name of the experiment, as
    description. Strategies without a ``summary()`` are ignored.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary; ``summary()`` is called on every rank, because it may gather."""
        describe = getattr(trainer.strategy, "summary", None)
        if describe is None:
            return
        summary = describe()
        if not trainer.is_global_zero:
            return
        text = render(summary)
        say(f"\n{text}\n")
        for logger in trainer.loggers:
            store_tags(logger, _tags(summary))
            store_text(logger, f"{text}\n", "layout.txt")
            if isinstance(logger, MLFlowLogger):
                logger.log_description(f"{logger.name}\n\n```text\n{text}\n```")


class LogDatasets(Callback):
    """Callback that logs the datasets of training and validation.

    Loggers that support datasets (``MLFlowLogger.log_dataset``) get name, source, hash, samples and
    tokens of every split, if the data module is a ``DescribedData``, as those of
    ``lightning_ptdp.data`` are."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the datasets, on global rank 0."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, MLFlowLogger)]
        if not loggers or not trainer.is_global_zero:
            return
        for dataset in records_of(getattr(trainer, "datamodule", None)):
            for logger in loggers:
                logger.log_dataset(dataset)


def _tags(summary: StrategySummary) -> dict[str, object]:
    layout = summary.layout
    tags = {
        "layout": layout.describe(),
        "world_size": layout.world_size,
        **{f"{axis.name}_parallel_size": layout.size(axis.name) for axis in layout.axes},
        "virtual_pipeline_size": layout.virtual_pipeline_size,
        "sequence_parallel": layout.sequence_parallel,
        "schedule": summary.schedule,
        "parameters": summary.parameters,
        "active_parameters": summary.active_parameters,
        "num_microbatches": summary.num_microbatches,
        "micro_batch_size": summary.micro_batch_size,
    }
    return {name: value for name, value in tags.items() if value is not None}


class InitFrom(Callback):
    """Callback that starts a fit with the weights of a checkpoint of any layout.

    A resumed run keeps the weights that it had reached. Needs the "ptdp" strategy. A Hugging Face
    folder (config.json and safetensors, as ``save_pretrained`` writes it) can be read into a module
    that wraps that model, built from its configuration, or into this package's own model of that
    kind. Each rank reads its own part.

    Args:
        path: The checkpoint folder, Lightning's single file, or the Hugging Face folder.
        strict: Whether names that only the model or only the checkpoint has are an error. False for
            a model with a new head: parameters that the checkpoint lacks keep their initial values.
        rename: Maps names of the model to names in the checkpoint: ``{"encoder.": "model."}``. A
            key that ends with a dot applies to all names that begin with it. For a Hugging Face
            folder it is not needed if the module holds one such model.

    Raises:
        CheckpointError: (when fit begins) The checkpoint is damaged or does not fit; names the
            entries and shapes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._path = os.fspath(path)
        self._strict = strict
        self._rename = dict(rename or {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the weights, unless those of a resumed checkpoint have been restored already.

        If the model is cut, a resumed checkpoint is restored after this hook."""
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "load_weights"):
            raise ValueError(
                f'InitFrom needs Trainer(strategy="ptdp"), not {type(strategy).__name__}'
            )
        if trainer.ckpt_path is None or strategy.restore_checkpoint_after_setup:
            strategy.load_weights(self._path, strict=self._strict, rename=self._rename)
