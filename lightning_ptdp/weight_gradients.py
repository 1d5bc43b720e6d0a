"""The backward of a matrix product in two halves: the input's gradient at once, the weight's gradient when the schedule has time.

Zero-bubble schedules (arXiv 2401.10241, section 3) put the weight gradients of a microbatch into an action of their own. The gradient
of y = x W^T with respect to W needs only x and the gradient of y, so a linear layer can keep these two and hand the product in
later; the rest of the graph is freed in between.

Nothing in a model has to change: while a forward runs under ``intercepting``, products with a parameter (``F.linear``,
``torch.addmm`` and ``torch.matmul``) become ones that know how to wait. Gradients of other operations (norms, embeddings) are cheap and
stay in the first half. So a model that this file understands only in part, or not at all, still gets the right gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lightning_ptdp._torch import gradient_dtype, has_gradient_hooks, has_saved_tensor_hooks

__all__ = ["WeightGradients", "autocast_dtype"]


@dataclass(frozen=True)
class _PutOff:
    """A gradient that is still to be computed: ``grad``^T ``x``, or whatever ``compute`` returns.

    Attributes:
        parameter: Whose gradient it is.
        grad: (n, o), gradient of the output.
        x: (n, i), or a function that starts to fetch it and returns what waits for it.
        transpose: The parameter is (i, o).
        compute: Instead of the product.
    """

    parameter: Tensor
    grad: Tensor | None = None
    x: Tensor | Callable[[], Callable[[], Tensor]] | None = None
    transpose: bool = False
    compute: Callable[[], Tensor] | None = None


@dataclass(eq=False)
class WeightGradients:
    """What the backwards of one rank have put off, by (stage, microbatch).

    A module of one's own takes part if it has an attribute ``weight_gradients`` (None at first): when the schedule splits the
    backward it is set to this object, and the module's autograd function may call ``put_off`` where ``waits`` is true.
    """

    _kept: dict[Hashable, list[_PutOff]] = field(default_factory=dict)
    _collecting: list[_PutOff] | None = None
    _intercepting: int = 0
    _recomputing: int = 0

    @property
    def waits(self) -> bool:
        """Whether a backward runs whose weight gradients come later."""
        return self._collecting is not None

    @contextlib.contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """While the backward of ``key`` runs; autograd may run it on another thread."""
        self._collecting = self._kept.setdefault(key, [])
        try:
            yield
        finally:
            self._collecting = None

    def put_off(self, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
        """Add ``compute()`` (shape and dtype of the parameter) to the parameter's gradient later."""
        assert self._collecting is not None
        self._collecting.append(_PutOff(parameter, compute=compute))

    def put_off_product(
        self,
        parameter: Tensor,
        grad: Tensor,
        x: Tensor | Callable[[], Callable[[], Tensor]],
        *,
        transpose: bool = False,
    ) -> None:
        """Add ``grad``^T ``x`` to the gradient later: (..., o) and (..., i) -> (o, i), or (i, o) if ``transpose``.

        ``x`` may be a function that starts to gather it, and returns one that waits: it is started while the product before runs.
        """
        assert self._collecting is not None
        self._collecting.append(_PutOff(parameter, grad=grad, x=x, transpose=transpose))

    def parameters(self, key: Hashable) -> list[Tensor]:
        """Whose gradients ``run(key)`` adds to."""
        return list({id(entry.parameter): entry.parameter for entry in self._kept.get(key, ())}.values())

    def run(self, key: Hashable, done: Callable[[Tensor], None] | None = None) -> None:
        """Compute what the backward of ``key`` put off, in its order.

        Args:
            key: Of ``collecting``.
            done: Called with each parameter after the last addition to its gradient.
        """
        entries = self._kept.pop(key, [])
        last = {id(entry.parameter): index for index, entry in enumerate(entries)}
        fetched = _fetch(entries[0]) if entries else None
        with torch.no_grad():
            for index, entry in enumerate(entries):
                following = _fetch(entries[index + 1]) if index + 1 < len(entries) else None
                _accumulate(entry, fetched)
                fetched = following
                if done is not None and last[id(entry.parameter)] == index:
                    done(entry.parameter)
                entries[index] = _DONE

    def clear(self) -> None:
        """Forget what a failed step left."""
        self._kept.clear()
        self._collecting, self._intercepting, self._recomputing = None, 0, 0

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Around a forward whose weight gradients shall wait."""
        self._intercepting += 1
        try:
            with _Intercept(self):
                yield
        finally:
            self._intercepting -= 1

    def recomputation(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Contexts of a forward and of its recomputation: the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

        A product inside somebody else's checkpoint does not wait: its recomputation would run without ``intercepting``.
        """
        if not self._intercepting:
            return contextlib.nullcontext(), contextlib.nullcontext()
        return self._within_recomputation(), self._again()

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

    @property
    def can_wait(self) -> bool:
        """Whether a product of a forward that runs now may put off its weight gradient."""
        return self._recomputing > 0 or not has_saved_tensor_hooks()


_DONE = _PutOff(torch.empty(0))


def _fetch(entry: _PutOff) -> Callable[[], Tensor] | None:
    return entry.x() if callable(entry.x) else None


def _accumulate(entry: _PutOff, fetched: Callable[[], Tensor] | None) -> None:
    parameter = entry.parameter
    if entry.compute is not None:
        _add(parameter, entry.compute())
        return
    x = fetched() if fetched is not None else entry.x
    assert isinstance(x, Tensor)
    assert entry.grad is not None
    left, right = entry.grad.reshape(-1, entry.grad.size(-1)), x.reshape(-1, x.size(-1))
    if entry.transpose:
        left, right = right, left
    if parameter.grad is not None and parameter.grad.dtype == left.dtype == right.dtype:
        parameter.grad.addmm_(left.t(), right)  # in one pass over the gradient
    else:
        _add(parameter, left.t().mm(right))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad.add_(gradient)


class _Intercept(TorchFunctionMode):
    """Sends products with a parameter through ``_Product``; everything else goes its way."""

    def __init__(self, store: WeightGradients) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # its backward is compiled as one
            return function(*args, **(kwargs or {}))
        found = _READERS.get(function)
        operands = found(*args, **(kwargs or {})) if found is not None else None
        if operands is not None and self._store.can_wait and _can_wait(*operands[:3]):
            x, weight, bias, transpose = operands
            dtype = autocast_dtype(x)
            return _Product.apply(x if dtype is None else x.to(dtype), weight, bias, dtype, transpose, self._store)
        return function(*args, **(kwargs or {}))


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
    """A parameter's gradient may come later if nobody watches it arrive; other tensors' gradients are needed further down."""
    if not (torch.is_grad_enabled() and type(x) is Tensor and x.dim() > 1 and x.is_floating_point()):
        return False
    if not (_is_leaf(weight) and weight.dim() == 2 and weight.requires_grad):
        return False
    return bias is None or (_is_leaf(bias) and bias.dim() == 1)


def _is_leaf(value: Any) -> bool:
    return type(value) is nn.Parameter and not has_gradient_hooks(value)


class _Product(torch.autograd.Function):
    """x W^T + b (or x W + b), whose weight's gradient can wait."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        transpose: bool,
        store: WeightGradients,
    ) -> Tensor:
        # The parameters themselves: under recomputation a saved tensor comes back as another object.
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.dtype, ctx.transpose, ctx.store = weight, bias, dtype, transpose, store
        matrix = weight if dtype is None else weight.to(dtype)
        offset = bias if bias is None or dtype is None else bias.to(dtype)
        return F.linear(x, matrix.t() if transpose else matrix, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        store, weight, bias = ctx.store, ctx.weight, ctx.bias
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        with torch.autocast(grad.device.type, enabled=False):
            grad_x = None
            if wants_x:
                matrix = weight if ctx.dtype is None else weight.to(ctx.dtype)
                grad_x = grad.matmul(matrix.t() if ctx.transpose else matrix)
            if store.waits:
                if wants_weight:
                    store.put_off_product(weight, grad, x, transpose=ctx.transpose)
                if wants_bias:
                    store.put_off(bias, lambda: _sum_rows(grad))
                return grad_x, None, None, None, None, None
            left, right = (x, grad) if ctx.transpose else (grad, x)
            grad_weight = _rows(left).t().mm(_rows(right)) if wants_weight else None
            grad_bias = _sum_rows(grad) if wants_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _sum_rows(grad: Tensor) -> Tensor:
    return _rows(grad).sum(0)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast, which cannot see into a custom function, would cast to in front of ``F.linear`` (float64 is exempt)."""
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)
