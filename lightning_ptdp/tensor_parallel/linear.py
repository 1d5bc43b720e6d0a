"""Linear layers whose weight is sharded over the tensor group: by output columns, by input rows (arXiv 1909.08053, section 3).

Column then row is the usual pair: the activation between them stays split along its features, and a pair costs one all-reduce
forward (row) and one backward (column), so a transformer layer costs four. With sequence parallelism (arXiv 2205.05198, section
4.2.2) the activation outside of the pair is split along the sequence, and each all-reduce becomes an all-gather and a
reduce-scatter; of the column layer's input only the slice is kept for the backward pass and gathered again there:

    a pair              forward                              backward
    plain               1 all-reduce                         1 all-reduce
    sequence parallel   1 all-gather + 1 reduce-scatter      2 all-gathers + 1 reduce-scatter

Shapes: b samples, s tokens, i input features, o output features; ... stands for any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.matrix_product import MatrixProduct, autocast_dtype, bias_gradient
from lightning_ptdp.tensor_parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from lightning_ptdp.tensor_parallel.randomness import Randomness
from lightning_ptdp.weight_gradients import WeightGradients
from lightning_ptdp.world.mesh import Group

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "column_linear", "row_linear"]

_SEQUENCE = 1


class ColumnParallelLinear(nn.Module):
    """y = x W^T + bias with W split along its output features; the output stays split.

    Args:
        weight: Local weight (o/t, i); more rows than o/t if some heads are on several members.
        bias: Local bias (o/t), or None.
        parts: Output sizes of the parts of a fused layer, each split on its own: the local output is [q_r | k_r | v_r].
        transposed: The weight is stored as (i, o/t), as in Hugging Face's ``Conv1D``.
        enters: Whether the input enters the tensor-parallel region here; a region around the layer does it for several at once.
        group: The tensor group.
        sequence_parallel: The input is split along the sequence: (b, s/t, i) -> (b, s, o/t). Otherwise (..., i) -> (..., o/t).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        parts: Sequence[int] | None = None,
        transposed: bool = False,
        enters: bool = True,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        local, self.in_features = reversed(weight.shape) if transposed else weight.shape
        self.parts = tuple(parts) if parts is not None else (local * group.size,)
        self.out_features = sum(self.parts)
        self.transposed, self.enters = transposed, enters
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradients | None = None
        self.randomness: Randomness | None = None
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """This member's output features."""
        if self.randomness is not None and self.training:
            self.randomness.enter()
        if not self.enters:
            return F.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)
        return column_linear(
            x,
            self.weight,
            self.bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            weight_gradients=self.weight_gradients,
            transposed=self.transposed,
        )

    def extra_repr(self) -> str:
        """Full sizes and the split."""
        return _describe(self) + (f", parts={self.parts}" if len(self.parts) > 1 else "")


class RowParallelLinear(nn.Module):
    """y = sum over the group of x_r W_r^T, + bias once; W is split along its input features, as the input is.

    Args:
        weight: Local weight (o, i/t).
        bias: The whole bias (o), or None.
        transposed: The weight is stored as (i/t, o), as in Hugging Face's ``Conv1D``.
        group: The tensor group.
        sequence_parallel: The output is split along the sequence: (b, s, i/t) -> (b, s/t, o). Otherwise (..., i/t) -> (..., o).
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
        super().__init__()
        self.out_features, local = reversed(weight.shape) if transposed else weight.shape
        self.in_features = local * group.size
        self.transposed = transposed
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradients | None = None
        self.randomness: Randomness | None = None
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """The complete output, or under sequence parallelism this member's slice of it.

        Raises:
            ValueError: The input does not have this member's i/t features, or the sequence does not divide by t.
        """
        if x.size(-1) * self.group.size != self.in_features:
            raise ValueError(
                f"a row-parallel layer with {self.in_features} input features over {self.group.size} ranks takes "
                f"{self.in_features // self.group.size} features a rank, not {x.size(-1)}: its input must come from column-parallel "
                "layers, and what lies between must read the number of heads and the sequence length from those layers' output"
            )
        if self.randomness is not None:
            self.randomness.leave()
        return row_linear(
            x,
            self.weight,
            self.bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            weight_gradients=self.weight_gradients,
            transposed=self.transposed,
        )

    def extra_repr(self) -> str:
        """Full sizes and the split."""
        return _describe(self)


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: Group,
    sequence_parallel: bool = False,
    weight_gradients: WeightGradients | None = None,
    transposed: bool = False,
) -> Tensor:
    """What ``ColumnParallelLinear`` computes; under autocast in autocast's dtype."""
    return _apply(_ColumnLinear, x, weight, bias, group, sequence_parallel, weight_gradients, transposed)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: Group,
    sequence_parallel: bool = False,
    weight_gradients: WeightGradients | None = None,
    transposed: bool = False,
) -> Tensor:
    """What ``RowParallelLinear`` computes; under autocast in autocast's dtype."""
    return _apply(_RowLinear, x, weight, bias, group, sequence_parallel, weight_gradients, transposed)


def _apply(
    function: type[torch.autograd.Function],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_parallel: bool,
    store: WeightGradients | None,
    transposed: bool,
) -> Tensor:
    if group.size == 1:
        return F.linear(x, weight.t() if transposed else weight, bias)
    if sequence_parallel and x.dim() < 3:
        raise ValueError(
            f"sequence_parallel=True splits dimension 1 of (batch, sequence, features), but the input has shape {tuple(x.shape)}; "
            "give the layer three dimensions, or use sequence_parallel=False"
        )
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    return function.apply(x, weight, bias, MatrixProduct(weight, dtype, transposed), group, sequence_parallel, store)


class _ColumnLinear(torch.autograd.Function):
    """Only the local input is saved: under sequence parallelism the gathered one is t times larger."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: MatrixProduct,
        group: Group,
        sequence_parallel: bool,
        store: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.product, ctx.group, ctx.sequence_parallel, ctx.store = product, group, sequence_parallel, store
        if sequence_parallel:
            x = start_all_gather(x, dim=_SEQUENCE, group=group).wait()
        return product.output(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product, group, split = ctx.product, ctx.group, ctx.sequence_parallel
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        waits = wants_weight and ctx.store is not None and ctx.store.waits
        with torch.autocast(grad.device.type, enabled=False):
            # The gather hides behind the first matrix product, the reduction behind the second.
            gathering = start_all_gather(x, dim=_SEQUENCE, group=group) if split and wants_weight and not waits else None
            reducing = None
            if wants_x:
                grad_x = product.input_gradient(grad)
                if split:
                    reducing = start_reduce_scatter(grad_x, dim=_SEQUENCE, group=group)
                else:
                    reducing = start_all_reduce(grad_x, group=group, in_place=True)
            if gathering is not None:
                x = gathering.wait()
            if waits:
                later = partial(_start_gathering, x, group) if split else x
                ctx.store.defer_product(product, grad, later)
            grad_weight = product.weight_gradient(grad, x) if wants_weight and not waits else None
            grad_bias = bias_gradient(grad) if wants_bias else None
        return reducing.wait() if reducing is not None else None, grad_weight, grad_bias, None, None, None, None


class _RowLinear(torch.autograd.Function):
    """The bias comes after the sum: added on every member before it, it would count t times."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: MatrixProduct,
        group: Group,
        sequence_parallel: bool,
        store: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.product, ctx.group, ctx.sequence_parallel, ctx.store = product, group, sequence_parallel, store
        partial = product.output(x)
        if sequence_parallel:
            y = start_reduce_scatter(partial, dim=_SEQUENCE, group=group).wait()
        else:
            y = start_all_reduce(partial, group=group, in_place=True).wait()
        return y if bias is None else y.add_(bias.to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product = ctx.product
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        with torch.autocast(grad.device.type, enabled=False):
            gathering = None
            if ctx.sequence_parallel and (wants_x or wants_weight):
                gathering = start_all_gather(grad, dim=_SEQUENCE, group=ctx.group)
            # Under sequence parallelism this is the slice's share of the bias' gradient: Sharding.partial says so.
            grad_bias = bias_gradient(grad) if wants_bias else None
            if gathering is not None:
                grad = gathering.wait()
            grad_x = product.input_gradient(grad) if wants_x else None
            grad_weight = None
            if wants_weight and ctx.store is not None and ctx.store.waits:
                ctx.store.defer_product(product, grad, x)
            elif wants_weight:
                grad_weight = product.weight_gradient(grad, x)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _start_gathering(x: Tensor, group: Group) -> Callable[[], Tensor]:
    return start_all_gather(x, dim=_SEQUENCE, group=group).wait


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, bias={layer.bias is not None}, "
        f"tensor_parallel_size={layer.group.size}, sequence_parallel={layer.sequence_parallel}"
    )
