"""Product of activations with a weight, and its gradients.

This is the only place that computes them and decides their precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.shims.torch import adds_to_gradient, gradient_dtype, keeping_casts


class StepCasts:
    """Copies of trainable parameters in lower precision, shared by a step's microbatches.

    Autocast keeps copies for torch's own functions, and this object for those of this package.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Tensor, bool], Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> StepCasts:
        """Return self: a copied layer has the parameters of another one only if it shares them."""
        return self

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the copies from here to the end of the context."""
        with keeping_casts():
            self._copies = {}
            try:
                yield
            finally:
                self._copies = None

    def cast(self, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return ``weight`` in ``dtype``; None: in its own."""
        copies = self._copies
        if copies is None or dtype is None or type(weight) is not nn.Parameter:
            return weight.to(dtype)
        if torch.compiler.is_compiling():  # a graph has no effects other than its outputs
            return weight.to(dtype)
        key = weight, torch.is_grad_enabled()  # a copy made without gradients passes on none
        copy = copies[key] if key in copies else weight.to(dtype)
        if weight.requires_grad and copy is not weight:
            copies[key] = copy
        return copy


@dataclass(frozen=True, eq=False)
class MatrixProduct:
    """y = x W^T, (..., i) -> (..., o).

    Attributes:
        weight: (o, i), the parameter itself: under recomputation a saved tensor comes back as
            another object.
        dtype: Dtype of the product; None: that of the weight. The product keeps the parameter and
            not a cast copy, which each microbatch in flight would have.
        transposed: The weight is stored as (i, o).
        casts: Cast copies of parameters.
    """

    weight: Tensor
    dtype: torch.dtype | None = None
    transposed: bool = False
    casts: StepCasts = field(default_factory=StepCasts)

    def output(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias."""
        return F.linear(x, self.matrix, None if bias is None else bias.to(self.dtype))

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input, (..., i), from that of the output, (..., o)."""
        return grad.matmul(self.matrix)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, in its shape.

        It is computed from that of the output (..., o) and the input (..., i).
        """
        left, right = self._factors(grad, x)
        return left.mm(right)

    def give_weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor | None:
        """Return ``weight_gradient``, or None after it was added to ``weight.grad``.

        It is added here, in fewer passes, if the running backward would add it to ``weight.grad``.
        """
        if (
            torch.compiler.is_compiling()  # a graph has no effects other than its outputs
            or not self.weight.is_leaf
            or self.weight.grad is None
            or not adds_to_gradient(self.weight)
        ):
            return self.weight_gradient(grad, x)
        self.add_weight_gradient(grad, x)
        return None

    def add_weight_gradient(self, grad: Tensor, x: Tensor) -> None:
        """Add ``weight_gradient`` to ``weight.grad``.

        One pass over ``weight.grad`` is enough if the dtypes and the device allow it.
        """
        left, right = self._factors(grad, x)
        if self.weight.grad is None:
            add_to_gradient(self.weight, left.mm(right))
        else:
            add_product(self.weight.grad, left, right)

    def _factors(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (x, grad) if self.transposed else (grad, x)
        return rows(left).t(), rows(right)

    @property
    def matrix(self) -> Tensor:
        """Return the weight as (o, i) in the product's dtype."""
        weight = self.casts.cast(self.weight, self.dtype)
        return weight.t() if self.transposed else weight


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the gradient of the bias, (o), from that of the output, (..., o)."""
    return rows(grad).sum(0)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to ``total``, in one pass if the dtypes and the device allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _multiplies_into(total, left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left.mm(right))


def add_to_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``parameter.grad``, which may not exist yet."""
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad.add_(gradient)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast would cast the inputs of a product.

    Autocast cannot see into a custom function. float64 is exempt.
    """
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _multiplies_into(total: Tensor, factor: Tensor) -> bool:
    """Return True if torch can add a product of such factors to a wider total.

    That is the case on NVIDIA's GPUs (and on the meta device, which represents them).
    """
    on_gpu = total.device.type == "meta" or (
        total.device.type == "cuda" and torch.version.hip is None
    )
    return (
        on_gpu and total.dtype is torch.float32 and factor.dtype in (torch.float16, torch.bfloat16)
    )


def rows(x: Tensor) -> Tensor:
    """Return a tensor (..., n) as a matrix."""
    return x.reshape(-1, x.size(-1))
