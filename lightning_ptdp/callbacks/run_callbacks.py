"""Callbacks at the start and at the end of a run.

At the start: initial weights, and descriptions of the layout and the datasets. At the end: a last
validation, and a report of the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.data_record import records_of
from lightning_ptdp.base.output import say
from lightning_ptdp.callbacks.artifacts import (
    mlflow_loggers,
    model_checkpoints,
    run_folder,
    store_tags,
    store_text,
)
from lightning_ptdp.callbacks.run_summary import StrategySummary, render
from lightning_ptdp.callbacks.step_metrics import Goodput


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
        for mlflow in mlflow_loggers(trainer):
            mlflow.log_description(f"{mlflow.name}\n\n```text\n{text}\n```")


class LogDatasets(Callback):
    """Callback that logs the datasets of training and validation.

    Loggers that support datasets (``MLFlowLogger.log_dataset``) get name, source, hash, samples and
    tokens of every split, if the data module is a ``DescribedData``, as those of
    ``lightning_ptdp.data`` are."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the datasets, on global rank 0."""
        loggers = mlflow_loggers(trainer)
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
        strategy = trainer.strategy
        if not hasattr(strategy, "load_weights"):
            raise ValueError(
                f'InitFrom needs Trainer(strategy="ptdp"), not {type(strategy).__name__}'
            )
        if trainer.ckpt_path is None or strategy.restore_checkpoint_after_setup:
            strategy.load_weights(self._path, strict=self._strict, rename=self._rename)


# ---- Report of a run and its results, at its end -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Results of a run and their paths.

    Attributes:
        folder: Folder of the run.
        checkpoint: The newest checkpoint, "" if there is none.
        best_checkpoint: The best checkpoint by the monitored metric, "" if no metric is monitored.
        monitor: Name of the monitored metric.
        best_score: Value of the monitored metric for the best checkpoint.
        validation: Results of the last validation, by name.
        tracking_uri: MLflow store, "" if the run is not logged to MLflow.
        run_id: MLflow run.
        url: Address of the run in a browser.
        goodput: Share of the time in steps that counted; None without the callback.
        slowest: Description of the slowest rank; "" if all ranks waited about equally long.
        finished: Whether training ended well.
    """

    folder: str
    checkpoint: str = ""
    best_checkpoint: str = ""
    monitor: str = ""
    best_score: float | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    tracking_uri: str = ""
    run_id: str = ""
    url: str = ""
    goodput: float | None = None
    slowest: str = ""
    finished: bool = False

    def lines(self) -> list[str]:
        """Return the record as lines of text."""
        lines = [f"{name + ':':12} {value:.4g}" for name, value in self.validation.items()]
        if self.goodput is not None:
            lines.append(f"goodput:     {self.goodput:.1%} of the time in steps that counted")
        if self.slowest:
            lines.append(f"slowest:     {self.slowest}")
        lines.append(f"run folder:  {self.folder}")
        if self.checkpoint:
            lines.append(f"checkpoint:  {self.checkpoint}")
        if self.best_checkpoint:
            score = "" if self.best_score is None else f" ({self.monitor} {self.best_score:.4g})"
            lines.append(f"best:        {self.best_checkpoint}{score}")
        if self.run_id:
            lines.append(f"MLflow run:  {self.url or self.run_id}")
            if not self.tracking_uri.startswith("http"):
                lines.append(
                    f"             after mlflow ui --backend-store-uri {self.tracking_uri}"
                )
        return lines


class RunReport(Callback):
    """Callback that prints the paths of the checkpoint and the MLflow run after training.

    It prints on global rank 0.

    Args:
        file: Also write the record to this file as JSON, when training starts and again at its end.
            A process that launched the ranks as child processes reads it with ``RunReport.read``,
            because it has no other access to their results.
    """

    def __init__(self, file: str | None = None) -> None:
        self.file = file

    @staticmethod
    def read(file: str) -> RunRecord | None:
        """Return the record in ``file``; None if training never started."""
        text = Path(file).read_text(encoding="utf-8") if Path(file).exists() else ""
        return RunRecord(**json.loads(text)) if text else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record of a run that has begun."""
        if trainer.is_global_zero:
            self._write(_record(trainer, finished=False))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final record and print it."""
        if trainer.is_global_zero:
            record = _record(trainer, finished=True)
            self._write(record)
            names = ("checkpoint", "best_checkpoint") if record.checkpoint else ()
            for logger in trainer.loggers:
                store_tags(logger, {name: getattr(record, name) for name in names})
            say("\n" + "\n".join(record.lines()))

    def _write(self, record: RunRecord) -> None:
        if self.file is not None:
            Path(self.file).write_text(json.dumps(asdict(record)), encoding="utf-8")


def _record(trainer: Trainer, *, finished: bool) -> RunRecord:
    callbacks = model_checkpoints(trainer)
    monitoring = next((c for c in callbacks if c.monitor), None)
    # With fast_dev_run, Lightning's logger has every attribute, as a function.
    loggers = (one for one in trainer.loggers if isinstance(getattr(one, "tracking_uri", 0), str))
    tracking = next((one for one in loggers if hasattr(one, "run_id")), None)
    measured = next((c for c in trainer.callbacks if isinstance(c, Goodput)), None)
    fields: dict[str, Any] = {}
    if monitoring is not None:
        score = monitoring.best_model_score
        fields |= {
            "best_checkpoint": monitoring.best_model_path,
            "monitor": monitoring.monitor,
            "best_score": None if score is None else float(score),
        }
    if tracking is not None:
        fields |= {
            "tracking_uri": str(tracking.tracking_uri),
            "run_id": str(tracking.run_id),
            "url": str(getattr(tracking, "url", "")),
        }
    return RunRecord(
        folder=str(run_folder(trainer)),
        checkpoint=next(
            (path for c in callbacks if (path := c.last_model_path or c.best_model_path)), ""
        ),
        validation={
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val")
        },
        goodput=measured.share if finished and measured is not None else None,
        slowest=measured.slowest if measured is not None else "",
        finished=finished,
        **fields,
    )


# ---- Callback that validates at the end of training ----------------------------------------------


class ValidateAtEnd(Callback):
    """Callback that validates after the last step of training.

    Without it there is no validation if ``max_steps`` or ``max_epochs`` ends training between two
    validations. It asks the Trainer to stop one step before the Trainer would stop by itself,
    because Lightning validates when asked to stop."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Ask the Trainer to stop on the last step."""
        last_step = 0 < trainer.max_steps <= trainer.global_step
        last_epoch = (
            trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
        )
        if last_step or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True
