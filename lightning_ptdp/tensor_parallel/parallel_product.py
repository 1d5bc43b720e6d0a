"""Matrix products distributed over the tensor group, with their collectives and gradients.

A collective overlaps with a product of the same layer where there is one. If there is none, the
layer can split its own product into pieces, on request (``overlap.py``).

Shapes: b samples, s tokens, i input features, o output features; ... stands for any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.forward.deferred_weight_gradients import Operand, WeightGradients
from lightning_ptdp.forward.matrix_product import MatrixProduct, bias_gradient
from lightning_ptdp.tensor_parallel.collectives import (
    PendingCollective,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_ptdp.tensor_parallel.overlap import Pieces, add_bias, multiply_gathered, sum_product
from lightning_ptdp.world.mesh import Group

_SEQUENCE = 1


@dataclass(frozen=True, eq=False)
class ParallelProduct:
    """A product distributed over the ranks of a group.

    Attributes:
        local: This rank's product.
        group: The tensor group.
        sequence_parallel: True if activations outside of the region are split along the sequence.
        store: Store for deferred weight gradients.
        pieces: Number of pieces of the sequence in which a collective overlaps with its own
            product.
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

    def output_of_all(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias for the x of all ranks."""
        if self.pieces == 1:
            return self.local.output(
                self.start_gather(x).wait() if self.sequence_parallel else x, bias
            )
        bias = None if bias is None else bias.to(x.dtype)
        return multiply_gathered(
            x, self.local.matrix.t(), bias, group=self.group, pieces=self.pieces
        )[0]

    def summed_output(self, x: Tensor) -> Tensor:
        """Sum every rank's x W^T and return it, or this rank's slice of it."""
        if self.pieces == 1:
            return self.start_sum(self.local.output(x)).wait()
        return sum_product(x, self.local.matrix.t(), group=self.group, pieces=self.pieces)

    def input_gradient_of_all(self, grad: Tensor, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """Compute the input's gradient in pieces from all ranks' output gradients.

        Returns:
            The input's gradient, and the gathered output gradient (the local one unless ``keeps``).
        """
        grad_x, full_grad = multiply_gathered(
            grad, self.local.matrix, group=self.group, pieces=self.pieces, keeps=keeps
        )
        return grad_x, grad if full_grad is None else full_grad

    def start_summed_gradient(self, grad: Tensor, *, alone: bool) -> Callable[[], Tensor]:
        """Start the sum of the input's gradient, computed from the output's.

        ``alone`` is True if no other product can overlap with this sum.
        """
        if not alone or self.pieces == 1:
            return self.start_sum(self.local.input_gradient(grad)).wait
        total = sum_product(grad, self.local.matrix, group=self.group, pieces=self.pieces)
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
        return product.output_of_all(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), product = ctx.saved_tensors, ctx.product
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
        y = product.summed_output(x)
        return y if bias is None else add_bias(y, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), product = ctx.saved_tensors, ctx.product
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
                grad_x, grad = product.input_gradient_of_all(grad, keeps=wants_weight)
            else:
                grad_x = product.local.input_gradient(grad) if wants_x else None
            grad_weight = product.weight_gradient(grad, x) if wants_weight else None
        return grad_x, grad_weight, grad_bias, None
