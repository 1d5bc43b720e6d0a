"""Callback that initializes a model from existing weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

__all__ = ["InitFrom"]


class InitFrom(pl.Callback):
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
        self._path, self._strict, self._rename = os.fspath(path), strict, dict(rename or {})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load the weights, unless those of a resumed checkpoint have been restored already.

        If the model is cut, a resumed checkpoint is restored after this hook."""
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "load_weights"):
            raise ValueError(
                f'InitFrom needs Trainer(strategy="ptdp"), not {type(strategy).__name__}'
            )
        if trainer.ckpt_path is None or strategy.restore_checkpoint_after_setup:
            strategy.load_weights(self._path, strict=self._strict, rename=self._rename)
