"""Number of blocks of a model that one process can hold."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_ptdp.verification.case import Case
from lightning_ptdp.verification.processes import run_ranks
from lightning_ptdp.verification.training import Subject

__all__ = ["blocks_that_fit"]

_BYTES = 16
"""A parameter's value, gradient and two states of an optimizer, in float32."""


def blocks_that_fit(subject: Subject, case: Case) -> int | None:
    """Return the number of blocks to keep: one a stage, at least two; None if one process can hold the whole model."""
    file = subject.folder / "fits"
    on_gpu = subject.trainer.get("accelerator", "auto") != "cpu" and torch.cuda.is_available()
    measure = partial(_measure, subject.module, on_gpu=on_gpu, file=file)
    run_ranks(measure, 1, name="measuring the model", log=subject.folder / "memory.txt", limit_s=subject.limit_s)
    return None if file.read_text() == "True" else max(case.config.num_stages, 2)


def _measure(module: Any, *, on_gpu: bool, file: Path) -> None:
    with torch.device("meta"):
        module.configure_model()
    needed = _BYTES * sum(parameter.numel() for parameter in module.parameters())
    available = psutil.virtual_memory().available
    if on_gpu:
        available = min(available, torch.cuda.mem_get_info()[0])
    file.write_text(str(needed <= available))
