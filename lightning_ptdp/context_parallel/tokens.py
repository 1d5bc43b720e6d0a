"""A single token of the sequence, as models pick it that pool: ``x[:, 0]`` for a classifier, ``x[:, -1]`` for a score.

A slice has first and last tokens of its own. Those of the whole sequence are both on the group's first rank (``sharding.py``), which
hands them to the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.context_parallel.errors import ContextParallelError
from lightning_ptdp.world.mesh import Group

__all__ = ["pick_token"]


def pick_token(x: object, index: object, *, length: int, group: Group) -> Tensor | None:
    """What ``x[index]`` means for the whole sequence; collective if it means a token, on the ranks of the group alike.

    Args:
        x: Indexed tensor; a hidden state (b, s/c, h) is one of floating-point numbers with the slice's length along dimension 1.
        index: As given to ``x[...]``.
        length: s, tokens of the whole sequence.
        group: The context group.

    Returns:
        (b, ...) with a gradient for the rank that holds the token; None if no token of a hidden state is picked.

    Raises:
        ContextParallelError: A token in the middle is picked, or one by number.
    """
    if not (isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.size(1) == length // group.size):
        return None
    if not (isinstance(index, tuple) and len(index) > 1):
        return None
    if isinstance(index[0], Tensor) and isinstance(index[1], Tensor) and not index[1].is_floating_point():
        raise ContextParallelError(
            f"the model picks a token of each sample out of a hidden state by its number, of which each of {group.size} context ranks "
            f"holds a slice of {x.size(1)} tokens; only the first (0) and the last (-1) of the sequence can be picked. Use "
            "context_parallel_size=1"
        )
    if isinstance(index[0], Tensor) or index[0] != slice(None) or type(index[1]) is not int:
        return None
    if index[1] not in (0, -1):
        raise ContextParallelError(
            f"the model picks token {index[1]} out of a hidden state, of which each of {group.size} context ranks holds a slice of "
            f"{x.size(1)} tokens; only the first (0) and the last (-1) of the sequence can be picked. Use context_parallel_size=1"
        )
    return _FromFirst.apply(x[index].contiguous(), group)


class _FromFirst(torch.autograd.Function):
    """The first rank's tensor on every rank; all of them use it, so its gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        result = x.detach().clone()
        dist.broadcast(result, src=group.ranks[0], group=group.handle)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total if ctx.group.rank == 0 else torch.zeros_like(total), None
