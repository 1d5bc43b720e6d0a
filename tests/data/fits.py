"""Training runs that record the batches they read."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.data import TextDataModule
from lightning_ptdp.data.stream import IGNORE_INDEX


class BatchRecorder(pl.LightningModule):
    """Module that records every batch and fails in step ``fail_at``."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.fail_at = fail_at

    def record(self, batch: dict[str, torch.Tensor]) -> Any:
        return {name: value.tolist() for name, value in batch.items()}

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.fail_at:
            raise RuntimeError("this step fails")
        self.seen.append(self.record(batch))
        return self.weight * batch["input_ids"].float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Recorder(BatchRecorder):
    """Module that records the first tokens of samples and counts evaluated samples."""

    validated = 0

    def record(self, batch: dict[str, torch.Tensor]) -> list[int]:
        return batch["input_ids"][:, :8].flatten().tolist()

    def validation_step(self, batch, batch_idx):
        self.validated += int((batch["labels"] != IGNORE_INDEX).any(1).sum())

    test_step = validation_step


def data(corpus: Path, folder: Path, kind: Any = TextDataModule, **changes: Any) -> Any:
    settings = {
        "vocabulary_size": 320,
        "validation_fraction": 0.1,
        "sequence_length": 64,
        "micro_batch_size": 4,
        "num_microbatches": 2,
    }
    return kind(data_dir=str(folder), source=str(corpus), **{**settings, **changes})


def saved_at(
    stop: int, datamodule: Any, folder: Path, recorder: type[BatchRecorder] = Recorder
) -> tuple[list[Any], str]:
    """Train ``stop`` steps and return the recorded batches and the checkpoint's path."""
    module, name = recorder(), f"step{stop}"
    saving = ModelCheckpoint(folder, every_n_train_steps=stop, filename=name)
    trainer(folder, saving, max_epochs=-1, max_steps=stop).fit(module, datamodule=datamodule)
    return module.seen, str(folder / f"{name}.ckpt")


def continued(
    checkpoint: str,
    datamodule: Any,
    folder: Path,
    recorder: type[BatchRecorder] = Recorder,
    **limits: int,
) -> list[Any]:
    """Resume from a checkpoint and return the recorded batches."""
    module = recorder()
    trainer(folder, **limits).fit(module, datamodule=datamodule, ckpt_path=checkpoint)
    return module.seen


def check_overfitting(datamodule: Any, folder: Path) -> None:
    """Check that every epoch reads the same eight samples when overfitting."""
    few = Recorder()
    trainer(folder, overfit_batches=1, max_epochs=3, limit_val_batches=0).fit(
        few, datamodule=datamodule
    )
    samples = [
        sorted(tuple(batch[start : start + 8]) for start in range(0, 64, 8)) for batch in few.seen
    ]
    assert samples[0] == samples[1] == samples[2]


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
