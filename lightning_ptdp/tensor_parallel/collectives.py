"""Differentiable collectives over the tensor group, and their asynchronous primitives.

An operation and its gradient are conjugates: a sum in one direction is a copy in the other (arXiv
1909.08053, section 3, "f" and "g"; arXiv 2205.05198, section 4.2.2):

    function          forward                    backward
    copy              identity                   all-reduce
    reduce            all-reduce                 identity
    gather_sequence   all-gather                 reduce-scatter
    scatter_sequence  reduce-scatter             all-gather
    split_sequence    this rank's slice          all-gather
    join_sequence     all-gather                 this rank's slice
    gather_last       all-gather                 this rank's slice
    total             all-reduce                 all-reduce

Activations are (b, s, h). The sequence is therefore dimension 1, while collectives concatenate
along dimension 0. Moving the dimension costs one copy (none for a single sample). In a group of
one, every function returns its input and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.shims.torch_distributed import (
    all_gather_single,
    reduce_scatter_single,
    start_traced,
    wait_traced,
)
from lightning_ptdp.world.axes import nearest_multiples
from lightning_ptdp.world.mesh import Group


@dataclass(frozen=True, kw_only=True)
class PendingCollective:
    """A collective in progress.

    Attributes:
        work: Handle returned by ``torch.distributed``; None if ``finish`` does the waiting.
        finish: Builds the result once the work is done.
        source: Tensor that the collective reads, kept alive until then.
    """

    work: Any
    finish: Callable[[], Tensor]
    source: Tensor

    def wait(self) -> Tensor:
        """Return the result. On CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def start_all_reduce(
    x: Tensor, *, group: Group, in_place: bool = False, op: Literal["sum", "max"] = "sum"
) -> PendingCollective:
    """Sum ``x`` over the group, or take the maximum.

    The result overwrites ``x`` if ``in_place`` and ``x`` is contiguous. ``op`` is a string because
    a compiler cannot compare ``ReduceOp``s. Needed until torch 2.13.
    """
    if torch.compiler.is_compiling():
        x = x.contiguous()
        total = start_traced("all_reduce", x, op, group.name)
        return PendingCollective(work=None, finish=lambda: wait_traced(total), source=x)
    total = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    work = dist.all_reduce(total, op=reduce_op, group=group.handle, async_op=True)
    return PendingCollective(work=work, finish=lambda: total, source=total)


def start_all_gather(
    x: Tensor, *, dim: int, group: Group, after: Tensor | None = None
) -> PendingCollective:
    """Concatenate every rank's ``x`` (at least one dimension) along ``dim``.

    A compiler that finds the same gather in a forward and its backward runs it once and keeps the
    result. In a backward, pass the gradient as ``after`` to make it a different operation.
    """
    dim = dim % x.dim()
    x = x.contiguous()
    if torch.compiler.is_compiling():
        group_args = group.size, group.name
        gathered = (
            start_traced("all_gather_into_tensor", x, *group_args)
            if after is None
            else torch.ops.lightning_ptdp.gather_after(x, *group_args, after)
        )
        return PendingCollective(
            work=None,
            finish=lambda: _along(torch.unflatten(wait_traced(gathered), 0, (group.size, -1)), dim),
            source=x,
        )
    stacked = x.new_empty((group.size, *x.shape))
    work = all_gather_single(stacked.flatten(0, 1), x, group.handle, async_op=True)
    return PendingCollective(work=work, finish=lambda: _along(stacked, dim), source=x)


def start_reduce_scatter(x: Tensor, *, dim: int, group: Group) -> PendingCollective:
    """Sum ``x`` over the group and keep this rank's slice along ``dim``.

    Raises:
        ValueError: The dimension is not a multiple of the group's size.
    """
    dim = dim % x.dim()
    check_divisible(x, dim, group)
    stacked = torch.unflatten(x, dim, (group.size, -1)).movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        summed = start_traced(
            "reduce_scatter_tensor", stacked.flatten(0, 1), "sum", group.size, group.name
        )
        return PendingCollective(
            work=None, finish=lambda: wait_traced(summed).view(stacked.shape[1:]), source=stacked
        )
    part = x.new_empty(stacked.shape[1:])
    work = reduce_scatter_single(part, stacked.flatten(0, 1), group.handle, async_op=True)
    return PendingCollective(work=work, finish=lambda: part, source=stacked)


def _gather_after(x: Tensor, size: int, group: str, after: Tensor) -> Tensor:
    return start_traced("all_gather_into_tensor", x, size, group)


torch.library.define(
    "lightning_ptdp::gather_after", "(Tensor x, int size, str group, Tensor after) -> Tensor"
)
torch.library.impl("lightning_ptdp::gather_after", "default", _gather_after)
torch.library.register_fake("lightning_ptdp::gather_after", _gather_after)


def _along(stacked: Tensor, dim: int) -> Tensor:
    """Merge the stacked dimension into ``dim``: (t, ..., s, ...) -> (..., t s, ...)."""
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


def copy(x: Tensor, group: Group) -> Tensor:
    """Return ``x`` and sum its gradient over the group.

    Marks the entry of a region in which the ranks hold different weights.
    """
    return _exchange(_keep, _sum, x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of ``x`` over the group as a new tensor.

    Marks the exit of a region in which the ranks hold different weights.
    """
    return _exchange(_sum, _keep, x, group)


def total(x: Tensor, group: Group) -> Tensor:
    """Return the sum of ``x`` over the group as a new tensor, and sum its gradient too.

    Use it if each rank continues with a different computation.
    """
    return _exchange(_sum, _sum, x, group)


def gather_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Gather the full sequence from every rank's slice: (b, s/t, h) -> (b, s, h).

    Gradients are summed over the group.
    """
    return _exchange(_gather, _sum_slice, x, group, dim)


def scatter_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Sum over the group and return this rank's slice: (b, s, h) -> (b, s/t, h).

    Raises:
        ValueError: The sequence length is not a multiple of the group's size.
    """
    return _exchange(_sum_slice, _gather, x, group, dim)


def split_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Return this rank's slice of a replicated sequence: (b, s, h) -> (b, s/t, h).

    Raises:
        ValueError: The sequence length is not a multiple of the group's size.
    """
    return _exchange(_own_slice, _gather, x, group, dim)


def join_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Gather the full sequence from every rank's slice, without summing gradients.

    For a result that all ranks then use in the same computation.
    """
    return _exchange(_gather, _own_slice, x, group, dim)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Concatenate along the last dimension, without summing gradients.

    For a result that all ranks then use in the same computation.
    """
    return _exchange(_gather, _own_slice, x, group, -1)


Exchange: TypeAlias = Callable[[Tensor, Group, int], Tensor]


def _exchange(
    function: Exchange, gradient: Exchange, x: Tensor, group: Group, dim: int = 0
) -> Tensor:
    return x if group.size == 1 else _ShardExchange.apply(x, function, gradient, group, dim)


class _ShardExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Exchange, gradient: Exchange, group: Group, dim: int
    ) -> Tensor:
        ctx.gradient = gradient
        ctx.group = group
        ctx.dim = dim
        return function(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(grad, ctx.group, ctx.dim), None, None, None, None


def _keep(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_all_reduce(x, group=group).wait()


def _gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_all_gather(x, dim=dim, group=group).wait()


def _sum_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_reduce_scatter(x, dim=dim, group=group).wait()


def _own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    check_divisible(x, dim, group)
    length = x.size(dim) // group.size
    return x.narrow(dim, group.rank * length, length).clone(memory_format=torch.contiguous_format)


def check_divisible(x: Tensor, dim: int, group: Group) -> None:
    """Check that the sequence, dimension ``dim``, can be split over the group.

    Raises:
        ValueError: The length is not a multiple of the group's size. The message names lengths that
            are.
    """
    length = x.size(dim)
    size = group.size
    if length % size:
        raise ValueError(
            f"a sequence of length {length} cannot be split over tensor_parallel_size={size} ranks. "
            f"Use a length of {nearest_multiples(length, size)}, or sequence_parallel=False"
        )
