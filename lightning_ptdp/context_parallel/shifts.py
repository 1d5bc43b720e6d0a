"""Detection of shifts along time, which a slice of the sequence does not support.

The neighbours of the tokens at the ends of its chunks are on other ranks. ``logits[:, :-1]`` with
``labels[:, 1:]`` would leave the pair at every end of a chunk out of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_ptdp.attention import ContextParallelError

__all__ = ["check_index", "shifting_functions"]


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
    taken = _along_time(index, x.dim())
    if taken is None:
        return
    start, stop, step = taken.indices(x.size(1))
    # A selection of half of the tokens or less is not a shift.
    if step == 1 and x.size(1) < 2 * (stop - start) < 2 * x.size(1):
        ends = ":".join("" if end is None else str(end) for end in (taken.start, taken.stop))
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
    plain = [
        entry if isinstance(entry, (slice, int)) or entry is Ellipsis else None for entry in index
    ]
    if None in plain:
        return None
    if Ellipsis in plain:
        place = plain.index(Ellipsis)
        plain[place : place + 1] = [slice(None)] * (dims - len(plain) + 1)
    return plain[1] if len(plain) > 1 and isinstance(plain[1], slice) else None


def _refuse(doing: str, x: Tensor, length: int, size: int) -> None:
    raise ContextParallelError(
        f"the step {doing} of a tensor {tuple(x.shape)}, but each of {size} context ranks has "
        f"{x.size(1)} of {length} tokens, in two chunks. Pairs of neighbours at the ends of "
        "the chunks would be lost. Shift labels in the dataset or the collate function, or "
        "use context_parallel_size=1"
    )
