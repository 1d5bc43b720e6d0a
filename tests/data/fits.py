"""A fit that records what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_ptdp.data import TextDataModule
from lightning_ptdp.data.stream import IGNORE_INDEX


class Recorder(pl.LightningModule):
    """Remembers what it was given; fails in step ``fail_at`` of its life."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated = 0
        self.fail_at = fail_at

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise RuntimeError("this step fails")
        self.seen.append(batch["input_ids"][:, :8].flatten().tolist())
        return self.weight * batch["input_ids"].float().mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated += int((batch["labels"] != IGNORE_INDEX).any(1).sum())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(corpus: Path, folder: Path, **changes: Any) -> TextDataModule:
    settings = {
        "vocabulary_size": 320,
        "validation_fraction": 0.1,
        "sequence_length": 64,
        "micro_batch_size": 4,
        "num_microbatches": 2,
    }
    return TextDataModule(data_dir=str(folder), source=str(corpus), **{**settings, **changes})


def trainer(folder: Path, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(callbacks),
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **changes})
