"""Gradients of a single replica, without buckets.

Like buckets, they can be taken off ``.grad``. They have no buffers, which only a reduction needs.
Autograd then keeps the first microbatch's gradients as they are, whereas a buffer would need to be
cleared and added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_ptdp.data_parallel.bucket import HALF, GradientState
from lightning_ptdp.data_parallel.gradient_sums import add_up
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.shims.torch import gradient_dtype, set_gradient_dtype


@dataclass(eq=False)
class UnbucketedGradients:
    """A ``GradientStore`` of a rank of a single replica.

    Args:
        parameters: Trained parameters in forward order. The order must be the same on all ranks
            that sum some of them.
        widen: Keep gradients of half-precision parameters in float32.
    """

    parameters: Sequence[ManagedParameter]
    widen: bool = True
    scatters: ClassVar[bool] = False
    _state: GradientState = GradientState.EMPTY
    _arrived: set[nn.Parameter] = field(default_factory=set)
    _hidden: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _weighed: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parameter in self._each():
            if self.widen and parameter.dtype in HALF:
                set_gradient_dtype(parameter, torch.float32)

    def begin(self, *, keep: bool) -> None:
        """Begin a batch; with ``keep`` it adds to the gradients that the parameters show."""
        self._hidden = {}
        if not keep:
            self._state = self._state.to(GradientState.EMPTY)
            self._weighed = {}
            for parameter in self._each():
                parameter.grad = None
        self._state = self._state.to(GradientState.ACCUMULATING)

    def show(self) -> None:
        """Restore the hidden gradients; a gradient that is still on its parameter stays."""
        for parameter, gradient in self._hidden.items():
            if parameter.grad is None:
                parameter.grad = gradient

    def hide(self) -> None:
        """Take the gradients off the parameters and keep them; an unused parameter's is zero."""
        for parameter in self._each():
            gradient = parameter.grad
            if gradient is not None:
                self._arrived.add(parameter)
            self._hidden[parameter] = _zeros(parameter) if gradient is None else gradient
            parameter.grad = None

    def expect(
        self, chunk: int | None, awaited: Iterable[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Do nothing: no reduction waits for a gradient."""

    def complete(self, parameter: Tensor) -> None:
        """Do nothing, like ``expect``."""

    def reduce(self, chunk: int | None, *, last: bool = True) -> None:
        """Do nothing, like ``expect``."""

    def finish(self, scale: float | None = None) -> None:
        """Complete the sums over other ranks, and scale."""
        self._state = self._state.to(GradientState.REDUCING)
        parts = []
        for managed in self.parameters:
            parameter = managed.parameter
            for region, group in managed.placement.sums:
                if parameter.grad is None:
                    parameter.grad = _zeros(parameter)
                views = managed.placement.within(region, parameter.grad)
                parts += [(view, group) for view in views]
        add_up(parts)
        if scale is not None:
            for gradient in self.local():
                gradient.mul_(scale)
        self._state = self._state.to(GradientState.REDUCED)

    def weigh(self, scale: float, *, last: bool) -> None:
        """Multiply the batch's gradients by ``scale``, and set them aside for the last batch.

        With ``last``, add those of the earlier batches instead.
        """
        for parameter in self._each():
            total = _sum(self._weighed.get(parameter), parameter.grad, scale)
            self._weighed[parameter], parameter.grad = (None, total) if last else (total, None)
        if last:
            self._weighed = {}

    @property
    def has_weighed(self) -> bool:
        """Return True if earlier batches of the accumulation have been weighed."""
        return bool(self._weighed)

    def buckets(self) -> tuple[()]:
        """Return no bucket."""
        return ()

    def local(self) -> Iterator[Tensor]:
        """Return the gradients that exist."""
        return (parameter.grad for parameter in self._each() if parameter.grad is not None)

    def joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients unchanged: each is a tensor of its own."""
        return list(gradients)

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters that never had a gradient, without tied ones."""
        return [
            managed.parameter
            for managed in self.parameters
            if not managed.placement.tied
            and managed.parameter.grad is None
            and managed.parameter not in self._arrived
        ]

    def close(self) -> None:
        """Detach from the parameters."""
        self._hidden = {}
        for parameter in self._each():
            parameter.grad = None
            set_gradient_dtype(parameter, parameter.dtype)

    def _each(self) -> Iterator[nn.Parameter]:
        return (managed.parameter for managed in self.parameters)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def _sum(accumulated: Tensor | None, gradient: Tensor | None, scale: float) -> Tensor | None:
    if gradient is None:
        return accumulated
    gradient.mul_(scale)
    return gradient if accumulated is None else accumulated.add_(gradient)
