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

from lightning_ptdp.data_parallel.bucket import HALF
from lightning_ptdp.data_parallel.gradient_sums import add_up
from lightning_ptdp.data_parallel.reduction import BucketEntry
from lightning_ptdp.shims.torch import gradient_dtype, set_gradient_dtype

__all__ = ["UnbucketedGradients"]


@dataclass(eq=False)
class UnbucketedGradients:
    """All gradients of one rank of a single replica, without a reduction.

    Args:
        entries: Parameters in forward order. The order must be the same on all ranks that sum some
            of them.
        widen: Keep gradients of half-precision parameters in float32.
    """

    entries: Sequence[BucketEntry]
    widen: bool = True
    scatters: ClassVar[bool] = False
    _arrived: set[nn.Parameter] = field(default_factory=set)
    _kept: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _stash: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(entry.reduction.size == 1 for entry in self.entries)
        for entry in self.entries:
            if self.widen and entry.parameter.dtype in HALF:
                set_gradient_dtype(entry.parameter, torch.float32)

    def install(self) -> None:
        """Restore the kept gradients; a gradient that is still on its parameter stays."""
        for parameter, gradient in self._kept.items():
            if parameter.grad is None:
                parameter.grad = gradient

    def resume(self) -> None:
        """Continue to accumulate into the current gradients of the parameters."""
        self._kept = {}

    def park(self) -> None:
        """Take the gradients off the parameters and keep them; an unused parameter's is zero."""
        for entry in self.entries:
            parameter, gradient = entry.parameter, entry.parameter.grad
            if gradient is not None:
                self._arrived.add(parameter)
            self._kept[parameter] = _zeros(parameter) if gradient is None else gradient
            parameter.grad = None

    def zero(self) -> None:
        """Discard all gradients."""
        self._stash = {}
        self._kept = {}
        for entry in self.entries:
            entry.parameter.grad = None

    def finish(self, scale: float | None = None) -> None:
        """Complete the sums over other ranks, and scale."""
        summed = [(entry.parameter, entry.sums) for entry in self.entries if entry.sums]
        for parameter, _ in summed:
            if parameter.grad is None:
                parameter.grad = _zeros(parameter)
        add_up(
            (parameter.grad[where], group)
            for parameter, sums in summed
            for where, group in sums
            if parameter.grad is not None
        )
        if scale is not None:
            for gradient in self.local():
                gradient.mul_(scale)

    def stash(self, scale: float) -> None:
        """Move ``scale`` times the gradients to the stash.

        The next batch of an accumulation can then be scaled separately.
        """
        for entry in self.entries:
            self._stash[entry.parameter] = _sum(
                self._stash.get(entry.parameter), entry.parameter.grad, scale
            )
            entry.parameter.grad = None

    def unstash(self, scale: float) -> None:
        """Multiply the gradients by ``scale`` and add the stash."""
        for parameter, kept in self._stash.items():
            parameter.grad = _sum(kept, parameter.grad, scale)
        self._stash = {}

    @property
    def has_stash(self) -> bool:
        """Return True if the stash holds gradients."""
        return bool(self._stash)

    def local(self) -> Iterator[Tensor]:
        """Return the gradients that exist."""
        return (entry.parameter.grad for entry in self.entries if entry.parameter.grad is not None)

    def joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients unchanged: each is a tensor of its own."""
        return list(gradients)

    def close(self) -> None:
        """Detach from the parameters."""
        self.zero()
        for entry in self.entries:
            set_gradient_dtype(entry.parameter, entry.parameter.dtype)

    def unused(self) -> list[nn.Parameter]:
        """Return the parameters that never had a gradient.

        Tied parameters are left out, because another stage may have used them.
        """
        never = [
            entry
            for entry in self.entries
            if entry.parameter not in self._arrived and entry.parameter.grad is None
        ]
        return [entry.parameter for entry in never if not entry.tied]


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def _sum(kept: Tensor | None, gradient: Tensor | None, scale: float) -> Tensor | None:
    if gradient is None:
        return kept
    gradient.mul_(scale)
    return gradient if kept is None else kept.add_(gradient)
