"""Deferred weight gradients: the backward of a matrix product in two halves.

The input's gradient is computed at once. The weight's gradient is computed when the schedule has
time. Zero-bubble schedules (arXiv 2401.10241, section 3) put the weight gradients of a microbatch
into an action of their own. The gradient of y = x W^T with respect to W needs only x and the
gradient of y, so a linear layer can keep these two and compute the product later. The rest of the
graph is freed in between.

The model needs no change. While a forward runs under ``intercepting``, products with a parameter
(``F.linear``, ``torch.addmm`` and ``torch.matmul``) are replaced by products that can wait.
Gradients of other operations (norms, embeddings) are cheap and stay in the first half. A model that
this file recognizes only in part, or not at all, therefore still gets the right gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.base.torch_calls import Replacing
from lightning_ptdp.forward.matrix_product import (
    MatrixProduct,
    StepCasts,
    add_to_gradient,
    autocast_dtype,
    bias_gradient,
)
from lightning_ptdp.forward.surroundings import Context, Contexts, Forward, Surrounding
from lightning_ptdp.shims.quantization import class_of
from lightning_ptdp.shims.torch import has_gradient_hooks, saved_tensor_hooks

Operand = Tensor | Callable[[], Callable[[], Tensor]]
"""A tensor, or a function that starts to fetch it and returns a function that waits."""
Products = Callable[[Tensor, torch.dtype | None, bool, StepCasts], MatrixProduct]
"""``MatrixProduct``, or another class with the same constructor."""


Start = Callable[[], Callable[[], None]]
"""Starts to fetch the inputs of a gradient.

The returned function waits for them and adds to the parameter's gradient.
"""


@dataclass(eq=False)
class WeightGradients(Surrounding):
    """Deferred weight gradients of one rank, by (stage, microbatch).

    A user's module takes part if it has an attribute ``weight_gradients`` (None at first). When the
    schedule splits the backward, the attribute is set to this object. The module's autograd
    function may then call ``defer`` if ``waits`` is true.

    Attributes:
        casts: Cast copies of parameters.
    """

    casts: StepCasts = field(default_factory=StepCasts)
    _kept: dict[Hashable, list[tuple[Tensor, Start]]] = field(default_factory=dict)
    _collecting: list[tuple[Tensor, Start]] | None = None
    _recomputing: int = 0
    _usual_hooks: object = None

    @property
    def waits(self) -> bool:
        """Return True if a backward runs whose weight gradients come later."""
        return self._collecting is not None

    @contextlib.contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Collect deferred gradients while the backward of ``key`` runs.

        Autograd may run it on another thread.
        """
        # Entries that a failed step left are discarded.
        self._collecting = self._kept[key] = []
        try:
            yield
        finally:
            self._collecting = None

    def defer(self, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
        """Add ``compute()`` to the parameter's gradient later.

        The result of ``compute()`` has the shape and dtype of the parameter.
        """
        self._defer(parameter, lambda: lambda: add_to_gradient(parameter, compute()))

    def defer_product(self, product: MatrixProduct, grad: Tensor, x: Operand) -> None:
        """Add the product's weight gradient later.

        Args:
            product: Its weight is the parameter.
            grad: (..., o), the output's gradient.
            x: (..., i), the input. An input that has to be gathered is requested while the previous
                product runs.
        """

        def start() -> Callable[[], None]:
            if isinstance(x, Tensor):
                return partial(product.add_weight_gradient, grad, x)
            wait = x()
            return lambda: product.add_weight_gradient(grad, wait())

        self._defer(product.weight, start)

    def _defer(self, parameter: Tensor, start: Start) -> None:
        assert self._collecting is not None
        self._collecting.append((parameter, start))

    def parameters(self, key: Hashable) -> list[Tensor]:
        """Return the parameters whose gradients ``run(key)`` adds to."""
        return list(dict.fromkeys(parameter for parameter, _ in self._kept.get(key, ())))

    def run(self, key: Hashable, done: Callable[[Tensor], None] | None = None) -> None:
        """Compute the gradients that the backward of ``key`` deferred, in its order.

        Args:
            key: Key of ``collecting``.
            done: Called with each parameter after the last addition to its gradient.
        """
        entries = deque(self._kept.pop(key, ()))
        remaining = Counter(parameter for parameter, _ in entries)
        next_add = entries[0][1]() if entries else None
        with torch.no_grad():
            while entries:
                parameter, _ = entries.popleft()
                add = next_add
                next_add = entries[0][1]() if entries else None
                assert add is not None
                add()
                remaining[parameter] -= 1
                if done is not None and not remaining[parameter]:
                    done(parameter)

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Set this object on modules that can defer, and return a function that removes it."""
        modules: list[Any] = [
            child for child in module.modules() if "weight_gradients" in vars(child)
        ]
        for child in modules:
            child.weight_gradients = self

        def detach() -> None:
            for child in modules:
                child.weight_gradients = None

        return detach

    def around(self, forward: Forward) -> Context:
        """Defer the products of a forward if its backward comes in two halves."""
        if not forward.splits_backward:
            return contextlib.nullcontext()
        forward.deferred = self
        self._usual_hooks = saved_tensor_hooks()
        return self.intercepting()

    def intercepting(self) -> Replacing:
        """Return the context of a forward whose weight gradients are deferred."""
        return Replacing(
            {function: partial(self._call, function, read) for function, read in _READERS.items()}
        )

    def _call(
        self,
        function: Callable[..., Any],
        read: Callable[..., Operands | None],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function of torch; a product with a parameter may defer its weight gradient."""
        # The backward of a compiled graph is compiled as one.
        operands = None if torch.compiler.is_compiling() else read(*args, **kwargs)
        if (
            operands is None
            # Hooks of another library's checkpoint: its recomputation would not be intercepted.
            or not (self._recomputing or saved_tensor_hooks() == self._usual_hooks)
            or not _can_wait(*operands[:3])
        ):
            return function(*args, **kwargs)
        x, weight, bias, transposed = operands
        return multiply(x, weight, bias, transposed=transposed, store=self, casts=self.casts)

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Return the contexts in which a recomputed forward may defer.

        A product inside another library's checkpoint does not wait, because its recomputation would
        run without ``intercepting``.
        """
        return (self._within_recomputation(), self._again()) if forward.deferred is self else None

    @contextlib.contextmanager
    def _within_recomputation(self) -> Iterator[None]:
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        with self._within_recomputation(), self.intercepting():
            yield


Operands = tuple[Any, Any, Any, bool]
"""(input, weight, bias, whether the weight is (i, o))."""


def _read_linear(input: Any, weight: Any, bias: Any = None) -> Operands | None:
    return input, weight, bias, False


def _read_matmul(input: Any, other: Any, **out: Any) -> Operands | None:
    return None if out else (input, other, None, True)


def _read_addmm(input: Any, mat1: Any, mat2: Any, **scales: Any) -> Operands | None:
    return None if scales else (mat1, mat2, input, True)


_READERS: dict[Any, Callable[..., Operands | None]] = {
    F.linear: _read_linear,
    torch.matmul: _read_matmul,
    Tensor.matmul: _read_matmul,
    Tensor.__matmul__: _read_matmul,
    torch.addmm: _read_addmm,
}


def _can_wait(x: Any, weight: Any, bias: Any) -> bool:
    """Return True if the parameter's gradient may come later.

    Nothing may observe its arrival. Gradients of tensors other than parameters are needed further
    down.
    """
    if not (
        torch.is_grad_enabled() and type(x) is Tensor and x.dim() > 1 and x.is_floating_point()
    ):
        return False
    if not (_is_leaf(weight) and weight.dim() == 2 and weight.requires_grad):
        return False
    return bias is None or (_is_leaf(bias) and bias.dim() == 1)


def _is_leaf(value: Any) -> bool:
    # A parameter whose values are not gathered has another class meanwhile.
    is_parameter = isinstance(value, nn.Parameter) and class_of(value) is nn.Parameter
    return is_parameter and not has_gradient_hooks(value)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    products: Products = MatrixProduct,
    transposed: bool = False,
    store: WeightGradients | None = None,
    casts: StepCasts | None = None,
) -> Tensor:
    """Return x W^T + bias, under autocast in its dtype.

    The gradients of a parameter may wait in ``store``.
    """
    dtype = autocast_dtype(x)
    store = store if _can_wait(x, weight, bias) else None
    return _DeferredProduct.apply(
        x if dtype is None else x.to(dtype),
        weight,
        bias,
        products(weight, dtype, transposed, casts or StepCasts()),
        store,
    )


class _DeferredProduct(torch.autograd.Function):
    """x W^T + b (or x W + b), with a weight gradient that can wait."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: MatrixProduct,
        store: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.product = product
        ctx.bias = bias
        ctx.store = store
        return product.output(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        product = ctx.product
        store = ctx.store
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = product.input_gradient(grad) if wants_x else None
            if store is not None and store.waits:
                if wants_weight:
                    store.defer_product(product, grad, x)
                if wants_bias:
                    store.defer(ctx.bias, partial(bias_gradient, grad))
                return grad_x, None, None, None, None
            grad_weight = product.give_weight_gradient(grad, x) if wants_weight else None
            grad_bias = bias_gradient(grad) if wants_bias else None
        return grad_x, grad_weight, grad_bias, None, None
