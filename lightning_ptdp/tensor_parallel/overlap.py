"""Matrix products overlapped with the collectives of sequence parallelism.

The sequence is processed in pieces. All pieces of an input are gathered at once, and each is
multiplied as soon as it arrives. Each piece of an output is summed while the next one is
multiplied. A piece holds the same tokens of every rank's slice, so that its result has a place in
the full sequence:

    the whole sequence    rank 0: a a b b c c | rank 1: a a b b c c    (t = 2, pieces a, b and c)

If GPUs can access each other's memory, torch does the same without NCCL, with each rank's slice as
a piece ("symmetric").

Shapes: b samples, s tokens, t ranks, i input and o output features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.shims.torch_distributed import all_gather_product, reduce_scatter_product
from lightning_ptdp.tensor_parallel.collectives import (
    check_divisible,
    start_all_gather,
    start_reduce_scatter,
)
from lightning_ptdp.world.mesh import Group

Pieces = Size | Literal["symmetric"]
_SEQUENCE = 1


def multiply_gathered(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    pieces: Pieces,
    keeps: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gather the full sequence from every rank's slice and multiply it by a matrix.

    Args:
        x: (b, s/t, i).
        matrix: (i, o).
        bias: (o), added to each token, or None.
        group: The tensor group.
        pieces: Maximum number of pieces of the sequence, or "symmetric".
        keeps: Return the gathered input, too.

    Returns:
        (b, s, o), and (b, s, i) or None.
    """
    if pieces == "symmetric":
        y, full_x = all_gather_product(x, matrix, dim=_SEQUENCE, group=group.name, keeps=keeps)
        y = y.contiguous()  # the sequence was the leading dimension
        return y if bias is None else add_bias(y, bias), full_x
    count = min(pieces, x.size(_SEQUENCE))
    gathering = [
        start_all_gather(piece, dim=_SEQUENCE, group=group)
        for piece in x.tensor_split(count, dim=_SEQUENCE)
    ]
    if torch.compiler.is_compiling():  # the compiler does not support strided outputs
        gathered = [_by_member(pending.wait(), group) for pending in gathering]
        y = torch.cat([_multiply(piece, matrix, bias) for piece in gathered], dim=_SEQUENCE)
    else:
        gathered = []
        y = x.new_empty((x.size(0) * group.size, x.size(_SEQUENCE), matrix.size(1)))
        for pending, place in zip(gathering, y.tensor_split(count, dim=_SEQUENCE), strict=True):
            piece = _by_member(pending.wait(), group)
            _multiply(piece, matrix, bias, out=place)
            gathered += [piece] if keeps else []
    return _joined(y, group), _joined(torch.cat(gathered, dim=_SEQUENCE), group) if keeps else None


def sum_product(x: Tensor, matrix: Tensor, *, group: Group, pieces: Pieces) -> Tensor:
    """Sum x times the matrix over the group and return this rank's slice.

    Shapes: (b, s, i), (i, o) -> (b, s/t, o).

    Raises:
        ValueError: The sequence length is not a multiple of the group's size.
    """
    check_divisible(x, _SEQUENCE, group)
    if pieces == "symmetric":
        return reduce_scatter_product(x, matrix, dim=_SEQUENCE, group=group.name).contiguous()
    x = _by_member(x, group)
    summing = [
        start_reduce_scatter(_joined(_multiply(piece, matrix), group), dim=_SEQUENCE, group=group)
        for piece in x.tensor_split(min(pieces, x.size(_SEQUENCE)), dim=_SEQUENCE)
    ]
    return torch.cat([pending.wait() for pending in summing], dim=_SEQUENCE)


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """Return y + bias, computed in place except in a compiled graph."""
    # Needed until torch 2.12, whose compiler keeps the gradients of a result that is changed in
    # place.
    if torch.compiler.is_compiling():
        return y + bias.to(y.dtype)
    return y.add_(bias.to(y.dtype))


def _multiply(
    x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply each rank's tokens separately: (b t, l, i) -> (b t, l, o).

    The output ``out`` may be strided, because the ranks' tokens are not adjacent in the full
    sequence.
    """
    matrices = matrix.expand(x.size(0), -1, -1)
    if bias is None:
        return torch.bmm(x, matrices, out=out)
    return torch.baddbmm(bias, x, matrices, out=out)


def _by_member(x: Tensor, group: Group) -> Tensor:
    """Separate the ranks' tokens: (b, t l, ...) -> (b t, l, ...)."""
    return torch.unflatten(x, _SEQUENCE, (group.size, -1)).flatten(0, 1)


def _joined(x: Tensor, group: Group) -> Tensor:
    """Join the ranks' tokens along the sequence: (b t, l, ...) -> (b, t l, ...)."""
    return torch.unflatten(x, 0, (-1, group.size)).flatten(1, 2)
