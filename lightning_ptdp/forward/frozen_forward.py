"""A forward without gradients before a training step, in any layout.

A step may need outputs of the model with other weights: a reference model in preference tuning, or
a teacher in distillation. Under a pipeline, ``training_step`` can call the model only once. These
outputs are therefore computed before the step, and passed to it in the batch::

    def on_train_batch_start(self, batch, batch_idx):
        batch["teacher"] = frozen_forward(self, batch, batch_idx, step="teacher_step")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_ptdp.forward.surroundings import Context

Within: TypeAlias = Callable[[], Context]
"""Function that returns the context of a forward."""


def frozen_forward(
    module: Any,
    batch: Any,
    batch_idx: int,
    *,
    step: str = "predict_step",
    within: Within = contextlib.nullcontext,
) -> Any:
    """Return the output of ``step(batch, batch_idx)`` for the full batch, on all ranks.

    Call it in a hook that all ranks enter, such as ``on_train_batch_start``. Under a pipeline, the
    batch passes through all stages in microbatches, as in validation. Modules are in evaluation
    mode, so there is no dropout. The output is merged like that of ``predict_step``.

    Args:
        module: The LightningModule, while its Trainer runs.
        batch: The batch.
        batch_idx: Its number.
        step: Name of the method, which calls the model once.
        within: Returns the context in which the model has other weights (``initial_values``).
    """
    strategy = module.trainer.strategy
    with evaluating(module), torch.no_grad():
        if hasattr(strategy, "frozen_step"):
            return strategy.frozen_step(step, batch, batch_idx, within)
        with within(), strategy.precision_plugin.forward_context():
            return getattr(module, step)(batch, batch_idx)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode inside, and restore their modes afterwards."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def initial_values(module: Any) -> Within:
    """Copy the values of all trained parameters that this rank holds.

    Returns:
        A function that returns a context in which the parameters have these values again. It
        exchanges the values in place, so it must not be entered inside of a step.
    """
    parallel = getattr(module.trainer.strategy, "parallel", None)
    held = (
        [p for p in module.parameters() if p.requires_grad]
        if parallel is None
        else [m.held for p, m in parallel.parameters.items() if p.requires_grad]
    )
    current = [values.detach() for values in held if values is not None]
    kept = [values.clone() for values in current]

    def exchange() -> None:
        for mine, other in zip(current, kept, strict=True):
            values = mine.clone()
            mine.copy_(other)
            other.copy_(values)

    @contextlib.contextmanager
    def exchanged() -> Any:
        exchange()
        try:
            yield
        finally:
            exchange()

    return exchanged
