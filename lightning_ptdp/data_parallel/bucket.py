"""A bucket: one contiguous buffer of gradients, with its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import torch
from torch import Tensor

from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.parameters.placement import Placement

__all__ = ["ALIGNMENT", "HALF", "Bucket", "GradientState", "ParameterState", "aligned"]


# ---- States of the gradients and of the parameters of a bucket -----------------------------------
#
# Both lives are circles, and every step is asserted::
#
#     EMPTY --begin--> ACCUMULATING --the last backward--> REDUCING --finish--> REDUCED --> EMPTY
#                       |        ^
#                       +-begin--+  (the next batch of an accumulation)
#
#     WHOLE --the optimizer's step--> SHARDED --publish--> GATHERING --wait--> WHOLE


class GradientState(Enum):
    """State of the gradients that are reduced together."""

    EMPTY = auto()
    """No gradient counts: before the first batch of a step."""
    ACCUMULATING = auto()
    """Backwards add to the gradients."""
    REDUCING = auto()
    """The sum over the replicas has been launched; nothing may write to the gradients."""
    REDUCED = auto()
    """The gradients are those of the optimizer's step."""

    def to(self, state: GradientState) -> GradientState:
        """Return ``state``, which must be able to follow."""
        assert state in _NEXT[self], f"gradients go from {self.name} to {state.name}"
        return state


class ParameterState(Enum):
    """State of the parameters that replicas gather together."""

    WHOLE = auto()
    """Every rank has the values of the last step."""
    SHARDED = auto()
    """Each rank has stepped on its own part, and has old values of the others."""
    GATHERING = auto()
    """The parts are on their way; nothing may read the parameters."""

    def to(self, state: ParameterState) -> ParameterState:
        """Return ``state``, which must be the next one."""
        following = self.value % len(ParameterState) + 1
        assert state.value == following, f"parameters go from {self.name} to {state.name}"
        return state


_NEXT = {
    GradientState.EMPTY: (GradientState.EMPTY, GradientState.ACCUMULATING),
    GradientState.ACCUMULATING: (
        GradientState.EMPTY,
        GradientState.ACCUMULATING,
        GradientState.REDUCING,
    ),
    GradientState.REDUCING: (GradientState.REDUCED,),
    GradientState.REDUCED: (GradientState.EMPTY,),
}


HALF = (torch.float16, torch.bfloat16)
ALIGNMENT = 32  # elements; keeps every view on a 128-byte boundary for float32


@dataclass(eq=False)
class Bucket:
    """One contiguous buffer of gradients.

    Attributes:
        parameters: Parameters of the bucket, in backward order.
        reduction: Sum of the buffer over the ranks that read other data.
        offsets: Offset of each parameter in the buffer.
        buffer: (n,) gradients. A few elements between parameters and at the end belong to no
            parameter and stay zero.
        views: Each parameter's part of the buffer, in its shape.
        state: What happens to the gradients.
        parameter_state: What happens to the parameters, if the optimizer is sharded.
        pending: Number of gradients that the last backward has not completed; None: another
            backward follows, or the reduction has started.
    """

    parameters: list[ManagedParameter]
    reduction: Reduction
    offsets: list[int]
    buffer: Tensor
    views: list[Tensor]
    state: GradientState = GradientState.EMPTY
    parameter_state: ParameterState = ParameterState.WHOLE
    pending: int | None = None

    @cached_property
    def chunk(self) -> int | None:
        """Return the stage whose backward completes the bucket; None if several contribute."""
        return self.parameters[0].chunk

    @cached_property
    def next_begins(self) -> dict[int, int]:
        """Map the end of each parameter to the aligned offset of the next one."""
        ends = {
            offset + view.numel() for offset, view in zip(self.offsets, self.views, strict=True)
        }
        return {end: aligned(end) for end in ends}

    def mine(self) -> Tensor:
        """Return the part of the buffer that holds the sums after ``finish``."""
        return self.reduction.mine(self.buffer)

    def own_parts(self) -> Iterator[tuple[ManagedParameter, Placement, slice]]:
        """Yield each parameter in ``mine`` with the placement of its part and its range there.

        The range is that of the whole buffer.
        """
        start = int(self.mine().storage_offset())
        stop = start + self.mine().numel()
        for managed, offset in zip(self.parameters, self.offsets, strict=True):
            first, last = max(start, offset), min(stop, offset + managed.parameter.numel())
            if first < last:
                part = managed.placement.flattened(
                    first - offset, last - offset, first=self.reduction.counts
                )
                yield managed, part, slice(first, last)


def aligned(size: int) -> int:
    """Return the next aligned offset after ``size`` elements."""
    return -(-size // ALIGNMENT) * ALIGNMENT
