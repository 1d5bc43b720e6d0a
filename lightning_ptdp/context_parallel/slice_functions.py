"""Functions of torch that mean something else on a slice of the sequence.

Attention covers the full sequence (``attention/``). A model that selects a token gets the token of
the full sequence instead of the slice's: ``x[:, 0]`` for a classifier, ``x[:, -1]`` for a score. The
group's first rank holds both tokens (``sequence_chunks.py``) and broadcasts them. Shifts along time
are refused, and random numbers are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.attention import ContextParallelError, SlicedAttention, intercepted
from lightning_ptdp.base.function_replacement import Replacing
from lightning_ptdp.context_parallel.dropout_draws import SliceDraws
from lightning_ptdp.world.mesh import Group


@dataclass(kw_only=True)
class SliceFunctions:
    """Replaced functions of one forward.

    Attributes:
        attention: Attention that replaces the model's.
        group: The context group.
        length: s, tokens of the full sequence.
        shifts: Error about tokens or labels that the step shifts, if it does.
        draws_alike: Returns True while all ranks of the group draw from one stream of random
            numbers.
    """

    attention: SlicedAttention
    group: Group
    length: int
    shifts: ContextParallelError | None = None
    draws_alike: Callable[[], bool] = bool

    def mode(self) -> Replacing:
        """Return the mode under which the functions are replaced."""
        draws = SliceDraws(
            length=self.length,
            rank=self.group.rank,
            size=self.group.size,
            applies=lambda: self.draws_alike(),
        )
        return Replacing(
            {
                **draws.replaced(),
                **shifting_functions(self.length, self.group.size),
                **intercepted(self.attention),
                Tensor.__getitem__: self.index,
            }
        )

    def index(self, x: Tensor, index: Any) -> Tensor:
        """Return ``x[index]`` of the full sequence, if it selects a token.

        Raises:
            ContextParallelError: It shifts the sequence, or selects a token in the middle.
        """
        try:
            check_index(x, index, length=self.length, size=self.group.size)
        except ContextParallelError as error:
            if x.is_floating_point():
                raise
            self.shifts = (
                error  # a step may shift labels only to count those of a model that shifts
            )
        token = pick_token(x, index, length=self.length, group=self.group)
        return x[index] if token is None else token


def pick_token(x: object, index: object, *, length: int, group: Group) -> Tensor | None:
    """Return the result of ``x[index]`` for the full sequence.

    Collective if the index selects a token; it must do so on all ranks of the group.

    Args:
        x: Indexed tensor. A hidden state (b, s/c, h) is recognized by its floating-point dtype and
            the slice's length along dimension 1.
        index: The index in ``x[...]``.
        length: s, tokens of the full sequence.
        group: The context group.

    Returns:
        (b, ...) with a gradient for the rank that holds the token; None if no token of a hidden
        state is selected.

    Raises:
        ContextParallelError: A token in the middle is selected, or a token of each sample by
            number.
    """
    if not (
        isinstance(x, Tensor)
        and x.dim() == 3
        and x.is_floating_point()
        and x.size(1) == length // group.size
    ):
        return None
    if not (isinstance(index, tuple) and len(index) > 1):
        return None
    if (
        isinstance(index[0], Tensor)
        and isinstance(index[1], Tensor)
        and not index[1].is_floating_point()
    ):
        selection = "a token per sample by its index"
    elif isinstance(index[0], Tensor) or index[0] != slice(None) or type(index[1]) is not int:
        return None
    else:
        selection = f"token {index[1]}" if index[1] not in (0, -1) else ""
    if selection:
        raise ContextParallelError(
            f"the model selects {selection} from a hidden state, but each of {group.size} context "
            f"ranks has a slice of {x.size(1)} tokens. Only the first (0) and the last (-1) "
            "token can be selected. Use context_parallel_size=1"
        )
    return _FromFirst.apply(x[index].contiguous(), group)


class _FromFirst(torch.autograd.Function):
    """Broadcast of the first rank's tensor; its gradient is the sum over all ranks."""

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


# ---- Detection of shifts along time, which a slice of the sequence does not support --------------
#
# The neighbours of the tokens at the ends of its chunks are on other ranks. ``logits[:, :-1]`` with
# ``labels[:, 1:]`` would leave the pair at every end of a chunk out of the loss.


def check_index(x: object, index: object, *, length: int, size: int) -> None:
    """Check that ``x[index]`` drops no tokens at an end of this rank's slice.

    Args:
        x: Indexed tensor. Only hidden states or logits (b, s/c, h), and tokens or labels (b, s/c),
            are checked.
        index: The index in ``x[...]``.
        length: s, tokens of the full sequence.
        size: c.

    Raises:
        ContextParallelError: It drops tokens.
    """
    if not _is_slice(x, length // size) or not isinstance(index, tuple):
        return
    span = _along_time(index, x.dim())
    if span is None:
        return
    start, stop, step = span.indices(x.size(1))
    # A selection of half of the tokens or less is not a shift.
    if step == 1 and x.size(1) < 2 * (stop - start) < 2 * x.size(1):
        ends = ":".join("" if end is None else str(end) for end in (span.start, span.stop))
        _refuse(f"takes tokens [{ends}]", x, length, size)


def shifting_functions(length: int, size: int) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return further functions that can shift along time, and their checked versions."""
    return {
        **{
            function: partial(_roll, function, length, size)
            for function in (torch.roll, Tensor.roll)
        },
        **{
            function: partial(_narrow, function, length, size)
            for function in (torch.narrow, Tensor.narrow)
        },
    }


def _roll(
    function: Callable[..., Tensor], length: int, size: int, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    dims = kwargs.get("dims", args[-1] if len(args) > 1 else None)
    dims = (dims,) if isinstance(dims, int) else dims or ()
    if _is_slice(x, length // size) and any(dim % x.dim() == 1 for dim in dims):
        _refuse("rolls the tokens", x, length, size)
    return function(x, *args, **kwargs)


def _narrow(
    function: Callable[..., Tensor],
    length: int,
    size: int,
    x: Tensor,
    dim: int,
    start: Any,
    count: int,
) -> Tensor:
    if isinstance(start, int) and dim % max(x.dim(), 1) == 1:
        start = start % x.size(1) if start < 0 else start
        check_index(x, (slice(None), slice(start, start + count)), length=length, size=size)
    return function(x, dim, start, count)


def _is_slice(x: object, local: int) -> TypeGuard[Tensor]:
    """Return True for a slice of hidden states or logits, or of tokens or labels."""
    return (
        isinstance(x, Tensor)
        and x.dim() == (3 if x.is_floating_point() else 2)
        and x.size(1) == local
    )


def _along_time(index: tuple[Any, ...], dims: int) -> slice | None:
    """Return the slice of ``index`` for dimension 1, if it consists of slices and numbers."""
    entries = [
        entry if isinstance(entry, (slice, int)) or entry is Ellipsis else None for entry in index
    ]
    if None in entries:
        return None
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (dims - len(entries) + 1)
    return entries[1] if len(entries) > 1 and isinstance(entries[1], slice) else None


def _refuse(action: str, x: Tensor, length: int, size: int) -> None:
    raise ContextParallelError(
        f"the step {action} of a tensor {tuple(x.shape)}, but each of {size} context ranks has "
        f"{x.size(1)} of {length} tokens, in two chunks. Pairs of neighbours at the ends of "
        "the chunks would be lost. Shift labels in the dataset or the collate function, or "
        "use context_parallel_size=1"
    )
