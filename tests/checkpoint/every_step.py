"""Training run that saves a checkpoint folder after every step."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.toys import LitNet, Place, loader, make_trainer

__all__ = ["fit_saving"]


def fit_saving(folder: Path, steps: int, ckpt_path: Path | None = None, **saves: Any) -> L.Trainer:
    """Train up to step ``steps``. ``saves`` are options of ``ModelCheckpoint``."""
    saver = ModelCheckpoint(
        folder, filename="{step}", **{"every_n_train_steps": 1, "save_top_k": -1} | saves
    )
    place = Place(layout={"checkpoint_format": "folder"})
    trainer = make_trainer(
        place, callbacks=[saver], enable_checkpointing=True, max_epochs=-1, max_steps=steps
    )
    trainer.fit(LitNet(), loader(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer
