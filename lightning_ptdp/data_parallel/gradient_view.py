"""View of the gradients for hooks that run between the backward and the step.

``parameter.grad`` is the gradient of the optimizer's step; with a sharded optimizer it is this
rank's flat part. Elementwise changes act on the whole model's gradient, because every rank makes
them. A norm computed by torch's functions is the norm of the whole model. Any other number would
cover only a part, and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor

from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.shims.torch import replaced_total_norm

__all__ = ["GradientView"]

_Asks: Any = Tensor
_GETS, _SETS = _Asks.grad.__get__, _Asks.grad.__set__


class GradientView(PartialValues):
    """Context around the hooks.

    Args:
        parameters: This rank's parameters.
        everything: True if other ranks hold a part of each of them, or hold other parameters.
        norm: Computes the norm of a given order of the gradients of tensors, over all ranks.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[ManagedParameter],
        everything: bool,
        norm: Callable[[Collection[Tensor], float], Tensor],
    ) -> None:
        super().__init__(_refusal)
        self._owned = {one.stepped: one for one in parameters if one.stepped is not None}
        self._stepped = {one.parameter: value for value, one in self._owned.items()}
        self._everything, self._norm = everything, norm
        self._paused = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view inside the context."""
        with replaced_total_norm(self._total_norm), self:
            try:
                yield
            finally:
                self._names.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the view, so that this package can compute with parts."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func not in (_GETS, _SETS):
            return super().__torch_function__(func, types, args, kwargs)
        owner = self._stepped.get(args[0], args[0])
        result = func(owner, *args[1:])
        managed = self._owned.get(owner) if func == _GETS and result is not None else None
        if managed is not None and (self._everything or not managed.placement.is_whole):
            self._names[result] = managed.name
        return result

    def _total_norm(
        self,
        original: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: Any = None,
    ) -> Tensor:
        given: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._paused or (given and not any(one in self._names for one in given)):
            return original(given, norm_type, error_if_nonfinite, foreach)
        with self.paused():
            owners = {one.grad: one for one in self._owned if one.grad is not None}
            unknown = next((one for one in given if one not in owners), None)
            if unknown is not None:
                raise _refusal(self._names.get(unknown, "another tensor"), "get_total_norm")
            norm = self._norm({owners[one] for one in given}, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is not finite, so they "
                "cannot be clipped"
            )
        return norm


def _refusal(name: str, function: str) -> PartialModelError:
    return PartialModelError(
        f"a hook computes a number from the gradient of '{name}' ({function}), but this rank "
        "has only a part of it. Use torch.nn.utils.clip_grad_norm_ or get_total_norm, "
        "self.clip_gradients(...), Trainer(gradient_clip_val=...), "
        "trainer.strategy.compute_gradient_norm(), or PTDPStrategy(check_finite='skip') for "
        "gradients that are not finite"
    )
