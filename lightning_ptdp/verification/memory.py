"""Number of blocks of a model that one process can hold."""

from __future__ import annotations

import psutil
import torch

from lightning_ptdp.verification.case import Case
from lightning_ptdp.verification.training import Subject, blocks_of

__all__ = ["blocks_that_fit"]

_BYTES = 32
"""A parameter's value, gradient and two states of an optimizer in float32, in one process and in the layout's ranks together."""


def blocks_that_fit(subject: Subject, case: Case) -> int | None:
    """Return the number of blocks to keep; None if the whole model fits into this machine's memory."""
    module = subject.module
    with torch.device("meta"):
        pass
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters * _BYTES <= psutil.virtual_memory().available:
        return None
    _ = blocks_of(module, case)
    stages = case.config.num_stages
    return stages if stages > 1 else 2
