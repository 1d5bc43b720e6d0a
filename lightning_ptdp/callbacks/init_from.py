"""Training that begins with somebody's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

__all__ = ["InitFrom"]


class InitFrom(pl.Callback):
    """Begin a fit with the weights of a checkpoint of any layout; a run that is resumed keeps those
    that it had reached.

    Needs the "ptdp" strategy. A Hugging Face folder (config.json and safetensors, as
    ``save_pretrained`` writes it) is read for a module that wraps that model, built from its
    configuration, or for our own model of that kind; each rank reads its own part.

    Args:
        path: The checkpoint folder, Lightning's single file, or the Hugging Face folder.
        strict: Whether names that only the model or only the checkpoint has are an error. False for
            a model with a new head: what the checkpoint lacks keeps its initial values.
        rename: What names of the model are called in the checkpoint: ``{"encoder.": "model."}``. A
            key that ends with a dot stands for all names that begin with it. In a Hugging Face
            folder they are found without it, where the module holds one such model.

    Raises:
        CheckpointError: (when fit begins) The checkpoint is damaged or does not fit; names and
            shapes are told.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._path, self._strict, self._rename = os.fspath(path), strict, dict(rename or {})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load, unless the weights of a checkpoint that is resumed are there; those that are cut
        are restored after this."""
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "load_weights"):
            raise ValueError(
                f'InitFrom needs Trainer(strategy="ptdp"), not {type(strategy).__name__}'
            )
        if trainer.ckpt_path is None or strategy.restore_checkpoint_after_setup:
            strategy.load_weights(self._path, strict=self._strict, rename=self._rename)
