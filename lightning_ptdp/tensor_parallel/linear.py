"""Linear layers with weights sharded over the tensor group, by columns or by rows.

See arXiv 1909.08053, section 3.

A column-parallel layer is usually followed by a row-parallel one. The activation between them stays
split along its features. Such a pair costs one all-reduce forward (row) and one backward (column),
so a transformer layer costs four.

With sequence parallelism (arXiv 2205.05198, section 4.2.2) the activation outside of the pair is
split along the sequence, and each all-reduce becomes an all-gather and a reduce-scatter. The column
layer keeps only its slice of the input for the backward pass and gathers it again there:

    a pair              forward                              backward
    plain               1 all-reduce                         1 all-reduce
    sequence parallel   1 all-gather + 1 reduce-scatter      2 all-gathers + 1 reduce-scatter

If no other product can overlap with a collective, the layer can split its own product into pieces
to overlap them, on request (``overlap.py``).

Shapes: b samples, s tokens, i input features, o output features; ... stands for any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.forward.deferred_weight_gradients import (
    Operand,
    Products,
    WeightGradients,
    multiply,
)
from lightning_ptdp.forward.matrix_product import MatrixProduct, autocast_dtype, bias_gradient
from lightning_ptdp.tensor_parallel.collectives import (
    PendingCollective,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lightning_ptdp.tensor_parallel.overlap import Pieces, add_bias, multiply_gathered, sum_product
from lightning_ptdp.tensor_parallel.randomness import Randomness
from lightning_ptdp.world.mesh import Group

__all__ = ["ColumnParallelLinear", "ParallelLayer", "RowParallelLinear"]

_SEQUENCE = 1


class ParallelLayer(nn.Module):
    """Base class of layers that hold a shard of their weights and compute its products.

    Its attributes configure deferred weight gradients and random numbers.

    Args:
        transposed: Weights are stored as (i, o), as in Hugging Face's ``Conv1D``.
        group: The tensor group.
        sequence_parallel: Activations around the layer are split along the sequence.
    """

    shown: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "has_bias")

    def __init__(
        self, *, transposed: bool = False, group: Group, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.transposed, self.group, self.sequence_parallel = transposed, group, sequence_parallel
        self.weight_gradients: WeightGradients | None = None
        self.products: Products = MatrixProduct
        self.pieces: Pieces = 1
        self.randomness: Randomness | None = None

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, defers: bool = True
    ) -> Tensor:
        """Return x W^T + bias for this rank's output features.

        All ranks hold the same x, or slices of it under sequence parallelism. Under autocast x is
        cast to the autocast dtype.

        Args:
            x: (..., i), or (b, s/t, i) under sequence parallelism.
            weight: (o/t, i).
            bias: (o/t), or None.
            defers: The weight's gradient may be deferred.
        """
        return self._multiply(_ColumnLinear, x, weight, bias, defers)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum x_r W_r^T over the group and add the bias once.

        Shapes: (..., i/t) -> (..., o), or (b, s, i/t) -> (b, s/t, o) under sequence parallelism.
        """
        return self._multiply(_RowLinear, x, weight, bias, True)

    def _multiply(
        self,
        function: type[torch.autograd.Function],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        defers: bool,
    ) -> Tensor:
        if self.group.size == 1:
            return self._multiply_alone(x, weight, bias)
        if self.sequence_parallel and x.dim() < 3:
            raise ValueError(
                "sequence_parallel=True splits dimension 1 of (batch, sequence, features), but "
                f"the input has shape {tuple(x.shape)}; "
                "give the layer three dimensions, or use sequence_parallel=False"
            )
        dtype = autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        store = self.weight_gradients if defers else None
        pieces: Pieces = self.pieces if self.sequence_parallel and x.dim() == 3 else 1
        product = _Product(
            self.products(weight, dtype, self.transposed),
            self.group,
            self.sequence_parallel,
            store,
            pieces,
        )
        return function.apply(x, weight, bias, product)

    def _multiply_alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.products is MatrixProduct:
            return F.linear(x, weight.t() if self.transposed else weight, bias)
        return multiply(
            x,
            weight,
            bias,
            products=self.products,
            transposed=self.transposed,
            store=self.weight_gradients,
        )

    def extra_repr(self) -> str:
        """Show the full sizes and the split."""
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)
        return (
            f"{sizes}, tensor_parallel_size={self.group.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )

    @property
    def has_bias(self) -> bool:
        """Return True if there is a bias."""
        return self._parameters.get("bias") is not None


class ColumnParallelLinear(ParallelLayer):
    """y = x W^T + bias with W split along its output features; the output stays split.

    Args:
        weight: Local weight (o/t, i); more rows than o/t if several ranks hold the same heads.
        bias: Local bias (o/t), or None.
        parts: Output sizes of the parts of a fused layer. Each part is split on its own: the local
            output is [q_r | k_r | v_r].
        enters: True if the input enters the tensor-parallel region here. False if a region around
            several layers does it for all of them.
        transposed, group, sequence_parallel: As in ``ParallelLayer``. (b, s/t, i) -> (b, s, o/t) if
            the sequence is split, otherwise (..., i) -> (..., o/t).
    """

    shown = (*ParallelLayer.shown, "parts")
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        parts: Sequence[int] | None = None,
        enters: bool = True,
        transposed: bool = False,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(transposed=transposed, group=group, sequence_parallel=sequence_parallel)
        local, self.in_features = reversed(weight.shape) if transposed else weight.shape
        self.parts = tuple(parts) if parts is not None else (local * group.size,)
        self.out_features, self.enters = sum(self.parts), enters
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features."""
        if self.randomness is not None and self.training:
            self.randomness.enter()
        if not self.enters:
            return self._multiply_alone(x, self.weight, self.bias)
        return self.column(x, self.weight, self.bias)


class RowParallelLinear(ParallelLayer):
    """y = sum over the group of x_r W_r^T, plus the bias once.

    W and the input are split along the input features.

    Args:
        weight: Local weight (o, i/t).
        bias: The full bias (o), or None.
        transposed, group, sequence_parallel: As in ``ParallelLayer``. (b, s, i/t) -> (b, s/t, o) if
            the sequence is split, otherwise (..., i/t) -> (..., o).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        transposed: bool = False,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(transposed=transposed, group=group, sequence_parallel=sequence_parallel)
        self.out_features, local = reversed(weight.shape) if transposed else weight.shape
        self.in_features = local * group.size
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the full output, or this rank's slice of it under sequence parallelism.

        Raises:
            ValueError: The input does not have this rank's i/t features, or the sequence length is
                not a multiple of t.
        """
        if x.size(-1) * self.group.size != self.in_features:
            raise ValueError(
                f"a row-parallel layer with {self.in_features} input features over "
                f"{self.group.size} ranks takes "
                f"{self.in_features // self.group.size} features a rank, not {x.size(-1)}: its "
                "input must come from column-parallel "
                "layers, and what lies between must read the number of heads and the sequence "
                "length from those layers' output"
            )
        if self.randomness is not None:
            self.randomness.leave()
        return self.row(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class _Product:
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
        found, whole = multiply_gathered(
            grad, self.local.matrix, group=self.group, pieces=self.pieces, keeps=keeps
        )
        return found, grad if whole is None else whole

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


class _ColumnLinear(torch.autograd.Function):
    """Column-parallel product.

    Saves only the local input: the gathered one is t times larger under sequence parallelism.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product
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
                x = partial(_start_gathering, x, product)
            grad_weight = product.weight_gradient(grad, x) if wants_weight else None
            grad_bias = bias_gradient(grad) if wants_bias else None
        return reducing() if reducing is not None else None, grad_weight, grad_bias, None


class _RowLinear(torch.autograd.Function):
    """Row-parallel product.

    Adds the bias after the sum. Added by every rank before the sum, it would count t times.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product
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
            # declared by Sharding.partial.
            grad_bias = bias_gradient(grad) if wants_bias else None
            if gathering is not None:
                grad = gathering.wait()
            if in_pieces:
                grad_x, grad = product.input_gradient_of_all(grad, keeps=wants_weight)
            else:
                grad_x = product.local.input_gradient(grad) if wants_x else None
            grad_weight = product.weight_gradient(grad, x) if wants_weight else None
        return grad_x, grad_weight, grad_bias, None


def _start_gathering(x: Tensor, product: _Product) -> Callable[[], Tensor]:
    return product.start_gather(x).wait
