"""Matrix products distributed over the tensor group, with their collectives and gradients.

A collective overlaps with a product of the same layer where there is one. If there is none, the
layer can split its own product into pieces of the sequence, on request. All pieces of an input are
gathered at once, and each is multiplied as soon as it arrives. Each piece of an output is summed
while the next one is multiplied. A piece holds the same tokens of every rank's slice, so that its
result has a place in the full sequence:

    the full sequence    rank 0: a a b b c c | rank 1: a a b b c c    (t = 2, pieces a, b and c)

If GPUs can access each other's memory, torch does the same without NCCL, with each rank's slice as
a piece ("symmetric").

Shapes: b samples, s tokens, t ranks, i input features, o output features; ... stands for any
leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.base.option_types import Size
from lightning_ptdp.forward.deferred_weight_gradients import Operand, WeightGradients
from lightning_ptdp.forward.matrix_product import MatrixProduct, bias_gradient
from lightning_ptdp.shims.torch_distributed import all_gather_product, reduce_scatter_product
from lightning_ptdp.tensor_parallel.collectives import (
    PendingCollective,
    check_divisible,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_ptdp.world.mesh import Group

Pieces = Size | Literal["symmetric"]
_SEQUENCE = 1


@dataclass(frozen=True, eq=False)
class ParallelProduct:
    """A product distributed over the ranks of a group.

    Attributes:
        local: This rank's product.
        group: The tensor group.
        sequence_parallel: True if activations outside of the region are split along the sequence.
        store: Store for deferred weight gradients.
        pieces: Maximum number of pieces of the sequence in which a collective overlaps with its own
            product, or "symmetric".
    """

    local: MatrixProduct
    group: Group
    sequence_parallel: bool
    store: WeightGradients | None
    pieces: Pieces = 1

    @property
    def waits(self) -> bool:
        """Return True if the weight's gradient is computed later."""
        return self.store is not None and self.store.waits

    def start_gather(self, x: Tensor, *, after: Tensor | None = None) -> PendingCollective:
        """Start to gather the full sequence from every rank's slice."""
        return start_all_gather(x, dim=_SEQUENCE, group=self.group, after=after)

    def fetch(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to gather the full sequence; return a function that waits for it."""
        return self.start_gather(x).wait

    def start_sum(self, term: Tensor) -> PendingCollective:
        """Start the sum of every rank's term, or of this rank's slice of it."""
        if self.sequence_parallel:
            return start_reduce_scatter(term, dim=_SEQUENCE, group=self.group)
        return start_all_reduce(term, group=self.group, in_place=True)

    def start_summed_gradient(self, grad: Tensor, *, alone: bool) -> Callable[[], Tensor]:
        """Start the sum of the input's gradient, computed from the output's.

        ``alone`` is True if no other product can overlap with this sum.
        """
        if not alone or self.pieces == 1:
            return self.start_sum(self.local.input_gradient(grad)).wait
        total = self.sum_in_pieces(grad, self.local.matrix)
        return lambda: total

    def weight_gradient(self, grad: Tensor, x: Operand) -> Tensor | None:
        """Return the weight's gradient, or None if it is deferred or already accumulated.

        ``x`` may be a function that fetches the input, but only if the gradient is deferred.
        """
        if self.store is not None and self.store.waits:
            self.store.defer_product(self.local, grad, x)
            return None
        assert isinstance(x, Tensor)
        return self.local.give_weight_gradient(grad, x)

    def gather_in_pieces(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, keeps: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Gather the full sequence from every rank's slice and multiply it by a matrix.

        Args:
            x: (b, s/t, i).
            matrix: (i, o).
            bias: (o), added to each token, or None.
            keeps: Return the gathered input, too.

        Returns:
            (b, s, o), and (b, s, i) or None.
        """
        group = self.group
        if self.pieces == "symmetric":
            y, full_x = all_gather_product(x, matrix, dim=_SEQUENCE, group=group.name, keeps=keeps)
            y = y.contiguous()  # the sequence was the leading dimension
            return y if bias is None else _add_bias(y, bias), full_x
        count = min(self.pieces, x.size(_SEQUENCE))
        gathering = [self.start_gather(piece) for piece in x.tensor_split(count, dim=_SEQUENCE)]
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
        full_x = _joined(torch.cat(gathered, dim=_SEQUENCE), group) if keeps else None
        return _joined(y, group), full_x

    def sum_in_pieces(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Sum x times the matrix over the group and return this rank's slice.

        Shapes: (b, s, i), (i, o) -> (b, s/t, o).

        Raises:
            ValueError: The sequence length is not a multiple of the group's size.
        """
        group = self.group
        check_divisible(x, _SEQUENCE, group)
        if self.pieces == "symmetric":
            return reduce_scatter_product(x, matrix, dim=_SEQUENCE, group=group.name).contiguous()
        x = _by_member(x, group)
        summing = [
            start_reduce_scatter(
                _joined(_multiply(piece, matrix), group), dim=_SEQUENCE, group=group
            )
            for piece in x.tensor_split(min(self.pieces, x.size(_SEQUENCE)), dim=_SEQUENCE)
        ]
        return torch.cat([pending.wait() for pending in summing], dim=_SEQUENCE)


def _add_bias(y: Tensor, bias: Tensor) -> Tensor:
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


class ColumnProduct(torch.autograd.Function):
    """Column-parallel product.

    Saves only the local input: the gathered one is t times larger under sequence parallelism.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: ParallelProduct
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.product = product
        if product.pieces == 1:
            full_x = product.start_gather(x).wait() if product.sequence_parallel else x
            return product.local.output(full_x, bias)
        bias = None if bias is None else bias.to(x.dtype)
        return product.gather_in_pieces(x, product.local.matrix.t(), bias)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product = ctx.product
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            # The gather overlaps with the first matrix product, the reduction with the second.
            gathers = product.sequence_parallel and wants_weight
            gathering = (
                product.start_gather(x, after=grad) if gathers and not product.waits else None
            )
            alone = product.waits or not wants_weight
            reducing = product.start_summed_gradient(grad, alone=alone) if wants_x else None
            if gathering is not None:
                x = gathering.wait()
            elif gathers:
                x = partial(product.fetch, x)
            grad_weight = product.weight_gradient(grad, x) if wants_weight else None
            grad_bias = bias_gradient(grad) if wants_bias else None
        return reducing() if reducing is not None else None, grad_weight, grad_bias, None


class RowProduct(torch.autograd.Function):
    """Row-parallel product.

    Adds the bias after the sum. Added by every rank before the sum, it would count t times.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: ParallelProduct
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.product = product
        y = (
            product.start_sum(product.local.output(x)).wait()
            if product.pieces == 1
            else product.sum_in_pieces(x, product.local.matrix.t())
        )
        return y if bias is None else _add_bias(y, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product = ctx.product
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            in_pieces = wants_x and product.pieces != 1
            gathers = product.sequence_parallel and (wants_x or wants_weight) and not in_pieces
            gathering = product.start_gather(grad) if gathers else None
            # Under sequence parallelism this is the slice's share of the bias' gradient, as
            # declared by Placement.partial.
            grad_bias = bias_gradient(grad) if wants_bias else None
            if gathering is not None:
                grad = gathering.wait()
            if in_pieces:
                matrix = product.local.matrix
                grad_x, grad = product.gather_in_pieces(grad, matrix, keeps=wants_weight)
            else:
                grad_x = product.local.input_gradient(grad) if wants_x else None
            grad_weight = product.weight_gradient(grad, x) if wants_weight else None
        return grad_x, grad_weight, grad_bias, None
