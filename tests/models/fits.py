"""Trainer without output."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl


def quiet_trainer(folder: Path | None = None, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**(defaults | kwargs))
