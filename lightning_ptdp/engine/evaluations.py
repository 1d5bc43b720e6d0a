"""Support for optimizers that evaluate the loss several times in a step.

Such an optimizer moves between two points depending on the losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group

__all__ = ["Closure", "check_evaluates_again", "counted_evaluations", "may_evaluate_again"]

Closure = Callable[[], Tensor | None]


def may_evaluate_again(optimizer: Optimizer) -> bool:
    """Return True if the optimizer may call its closure more than once.

    Of torch's own optimizers, only LBFGS does.
    """
    return (
        isinstance(optimizer, torch.optim.LBFGS)
        or type(optimizer).__module__.partition(".")[0] != "torch"
    )


def check_evaluates_again(
    optimizer: Optimizer, layout: ParallelLayout, *, steps_on_copies: bool
) -> None:
    """Check that such an optimizer gets the same values on every rank as on one device.

    Args:
        optimizer: An optimizer that evaluates more than once in a step.
        layout: The degrees of parallelism.
        steps_on_copies: The model receives the new values only after the step.

    Raises:
        ValueError: It does not; the message names the optimizer, the reason and a fix.
    """
    name = type(optimizer).__name__
    if layout.world_size > layout.num_replicas:
        raise ValueError(
            f"{name} evaluates the loss several times in a step and uses the gradient of all "
            "parameters, but under tensor, pipeline or context parallelism a rank has only a "
            "part of it. Use it with data parallelism and microbatches only, or use an "
            "optimizer that evaluates the loss once (AdamW, SGD, ...)"
        )
    if steps_on_copies:
        raise ValueError(
            f"{name} evaluates the loss several times in a step, but with shard_optimizer=True "
            "or float32 copies of parameters in half precision, the model receives the new "
            "values only after the step. Use shard_optimizer=False and master_weights=False"
        )


def counted_evaluations(
    closure: Closure, *, scaled: Callable[[Tensor], Tensor], group: Group, again: Callable[[], None]
) -> Closure:
    """Return a closure with the same loss on all ranks, so that all ranks take the same path.

    Args:
        closure: Lightning's closure; returns the loss of this replica, or None.
        scaled: Returns the contribution of this replica's loss to the total over replicas.
        group: The replicas.
        again: Called before every evaluation of a step except the first.
    """
    evaluations = itertools.count()

    def evaluate() -> Tensor | None:
        if next(evaluations):
            again()
        loss = closure()
        if loss is None:
            return None
        total = scaled(loss).detach().clone()
        if group.size > 1:
            dist.all_reduce(total, group=group.handle)
        return total

    return evaluate
