"""Callback that logs the datasets of a run."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptdp.loggers import MLFlowLogger

__all__ = ["LogDatasets"]


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
