"""Stages of a pipeline of which nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

__all__ = ["lent_parameter"]


@contextlib.contextmanager
def lent_parameter(module: nn.Module, optimizers: Callable[[], Sequence[Optimizer]]) -> Iterator[None]:
    """While ``optimizers`` are made for a module of which all may be frozen: torch makes none of no parameters, but steps one without."""
    parameters = list(module.parameters())
    lent = parameters[0] if parameters and not any(parameter.requires_grad for parameter in parameters) else None
    if lent is None:
        yield
        return
    lent.requires_grad_(True)
    try:
        yield
    finally:
        lent.requires_grad_(False)
    for group in (group for optimizer in optimizers() for group in optimizer.param_groups):
        group["params"] = [parameter for parameter in group["params"] if parameter is not lent]
