"""Training on conversations, with and without images."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.parity import Training


@dataclass(frozen=True, kw_only=True)
class ChatTraining(Training):
    """A training run of three steps. ``saved_in`` is a folder for checkpoints of every step."""

    root: Path
    saved_in: str | None = None
    layout: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 2})
    steps: int = 3
    clip: float | None = 0.5
    validate_every: int | None = 0

    smallest: ClassVar[float] = 1e-3
    synced: ClassVar[tuple[str, ...]] = ("val_loss",)
    always_clips: ClassVar[bool] = False

    def make_callbacks(self) -> list[L.Callback]:
        if self.saved_in is None:
            return []
        return [ModelCheckpoint(self.saved_in, "{step}", every_n_train_steps=1, save_top_k=-1)]
