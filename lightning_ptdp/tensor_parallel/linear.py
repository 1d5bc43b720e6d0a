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

Shapes: b samples, s tokens, i input features, o output features; ... stands for any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.forward.deferred_weight_gradients import Products, WeightGradients, multiply
from lightning_ptdp.forward.matrix_product import MatrixProduct, StepCasts, autocast_dtype
from lightning_ptdp.tensor_parallel.parallel_product import (
    ColumnProduct,
    ParallelProduct,
    Pieces,
    RowProduct,
)
from lightning_ptdp.tensor_parallel.randomness import Randomness
from lightning_ptdp.world.mesh import Group


class ParallelLayer(nn.Module):
    """Base class of layers that hold a shard of their weights and compute its products.

    Its attributes configure deferred weight gradients, shared casts and random numbers.

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
        self.transposed = transposed
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradients | None = None
        self.products: Products = MatrixProduct
        self.step_casts = StepCasts()
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
        return self._multiply(ColumnProduct, x, weight, bias, defers)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum x_r W_r^T over the group and add the bias once.

        Shapes: (..., i/t) -> (..., o), or (b, s, i/t) -> (b, s/t, o) under sequence parallelism.
        """
        return self._multiply(RowProduct, x, weight, bias, True)

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
                "sequence_parallel=True splits dimension 1 of (batch, sequence, features), "
                f"but the input has shape {tuple(x.shape)}. Pass an input with three "
                "dimensions, or use sequence_parallel=False"
            )
        dtype = autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        store = self.weight_gradients if defers else None
        pieces: Pieces = self.pieces if self.sequence_parallel and x.dim() == 3 else 1
        product = ParallelProduct(
            self.products(weight, dtype, self.transposed, self.step_casts),
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
            casts=self.step_casts,
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
        self.out_features = sum(self.parts)
        self.enters = enters
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
                f"{self.group.size} ranks needs {self.in_features // self.group.size} features "
                f"on a rank, but its input has {x.size(-1)}. Its input must come from "
                "column-parallel layers, and code between them must read the number of heads "
                "and the sequence length from the outputs of these layers"
            )
        if self.randomness is not None:
            self.randomness.leave()
        return self.row(x, self.weight, self.bias)
