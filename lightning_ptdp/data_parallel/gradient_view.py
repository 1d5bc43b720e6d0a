"""View of the gradients for hooks that run between the backward and the step.

``parameter.grad`` is the gradient of the optimizer's step; with a sharded optimizer it is this
rank's flat part. Elementwise changes act on the whole model's gradient, because every rank makes
them. A norm computed by torch's functions is the norm of the whole model. Any other number would
cover only a part, and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.shims.torch import replaced_total_norm

__all__ = ["GradientView"]

_Asks: Any = Tensor
_GETS, _SETS = _Asks.grad.__get__, _Asks.grad.__set__


class GradientView(PartialValues):
    """Context around the hooks.

    Args:
        stepped: Maps a parameter to the tensor on which the optimizer steps instead.
        names: Names of all tensors with gradients, parameters or stepped tensors.
        partial: Those of them for which other ranks hold parts, or hold other tensors.
        norm: Computes the norm of a given order of the gradients of tensors, over all ranks.
    """

    def __init__(
        self,
        *,
        stepped: Mapping[nn.Parameter, Tensor],
        names: Mapping[Tensor, str],
        partial: Collection[Tensor],
        norm: Callable[[Collection[Tensor], float], Tensor],
    ) -> None:
        super().__init__(_refusal)
        self._stepped, self._owned, self._partial, self._norm = stepped, names, partial, norm
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
        if func == _GETS and result is not None and owner in self._partial:
            self._names[result] = self._owned[owner]
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
                f"the total norm of order {norm_type} of the gradients is not finite, so that "
                "they cannot be clipped"
            )
        return norm


def _refusal(name: str, function: str) -> PartialModelError:
    return PartialModelError(
        f"a hook computes a number from the gradient of '{name}' ({function}), of which this rank "
        "sees a part of the model's. Use "
        "torch.nn.utils.clip_grad_norm_ or get_total_norm, self.clip_gradients(...), "
        "Trainer(gradient_clip_val=...), "
        "trainer.strategy.compute_gradient_norm(), or PTDPStrategy(check_finite='skip') for "
        "gradients that are not finite"
    )
