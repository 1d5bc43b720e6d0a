"""Experiment tracking that is safe on many ranks."""

from lightning_ptdp.loggers.mlflow import MLFlowLogger

__all__ = ["MLFlowLogger"]
