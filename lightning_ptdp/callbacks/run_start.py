"""Callbacks that describe a run at its start: its layout and its datasets."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.base.output import say
from lightning_ptdp.callbacks.artifacts import store_tags, store_text
from lightning_ptdp.callbacks.run_summary import StrategySummary, render
from lightning_ptdp.loggers import MLFlowLogger

__all__ = ["LayoutSummary", "LogDatasets"]


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
    tokens of every split. The data module must provide them (``datasets()``, as those of
    ``lightning_ptdp.data`` do)."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the datasets, on global rank 0."""
        describe = getattr(getattr(trainer, "datamodule", None), "datasets", None)
        loggers = [logger for logger in trainer.loggers if isinstance(logger, MLFlowLogger)]
        if describe is None or not loggers or not trainer.is_global_zero:
            return
        for dataset in describe():
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
