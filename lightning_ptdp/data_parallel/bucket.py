"""A bucket of gradients, with its states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial

import torch
from torch import Tensor

from lightning_ptdp.data_parallel.flat_parameters import FlatParameters, aligned, parts_of
from lightning_ptdp.data_parallel.reduction import PendingReduction, Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.parameters.placement import Placement

# ---- States of the gradients of a bucket ---------------------------------------------------------
#
# The states form a cycle, and every transition is asserted::
#
#     EMPTY --begin--> ACCUMULATING --the last backward--> REDUCING --finish--> REDUCED --> EMPTY
#                       |        ^
#                       +-begin--+  (the next batch of an accumulation)
#
# Sharded gradients are added to a rank's part after every microbatch::
#
#     EMPTY --begin--> ACCUMULATING --a backward--> ADDING --finish--> REDUCED --> EMPTY
#                       ^                             |
#                       +-----the next microbatch-----+


class GradientState(Enum):
    """State of the gradients that are reduced together."""

    EMPTY = auto()
    """The buffer has no valid gradients: before the first batch of a step."""
    ACCUMULATING = auto()
    """Backwards add to the gradients."""
    REDUCING = auto()
    """The sum over the replicas has been launched; nothing may write to the gradients."""
    ADDING = auto()
    """The sums of all microbatches so far are being added to this rank's part of the gradients."""
    REDUCED = auto()
    """The gradients are those of the optimizer's step."""

    def to(self, state: GradientState) -> GradientState:
        """Return ``state``, which must be able to follow."""
        assert state in _NEXT[self], f"gradients go from {self.name} to {state.name}"
        return state


_NEXT = {
    GradientState.EMPTY: (GradientState.EMPTY, GradientState.ACCUMULATING),
    GradientState.ACCUMULATING: (
        GradientState.EMPTY,
        GradientState.ACCUMULATING,
        GradientState.REDUCING,
        GradientState.ADDING,
    ),
    GradientState.REDUCING: (GradientState.REDUCED,),
    GradientState.ADDING: (
        GradientState.EMPTY,
        GradientState.ACCUMULATING,
        GradientState.REDUCED,
    ),
    GradientState.REDUCED: (GradientState.EMPTY,),
}


HALF = (torch.float16, torch.bfloat16)


def own_backward_refusal() -> ValueError:
    """Return the error for a backward of the user's whose gradients the optimizer would see."""
    return ValueError(
        "the module calls backward() itself while the gradients of a step are accumulated. One "
        "process would add its gradients to those, but replicas and microbatches cannot weigh "
        "them. Use torch.autograd.grad, add the loss to that of training_step, or call it in "
        "training_step with accumulate_grad_batches=1"
    )


@dataclass(eq=False)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        parameters: Parameters of the bucket, in backward order.
        reduction: Sum of the gradients over the ranks that read other data.
        offsets: Offset of each parameter in the bucket.
        size: n, elements. A few elements between parameters and at the end belong to no parameter
            and stay zero.
        buffer: (n,) gradients; if they are sharded, the sums of this rank's part of them.
        views: Each parameter's part of the buffer, in its shape; none if gradients are sharded.
        unsummed: (n,) gradients of this rank that have not been summed, if gradients are sharded.
            None: there are none.
        state: State of the gradients.
        flat: Storage of the parameters, if they are sharded; else the sharded optimizer makes one.
        pending: Number of gradients that the last backward has not completed; None: another
            backward follows, or the reduction has started.
    """

    parameters: list[ManagedParameter]
    reduction: Reduction
    offsets: list[int]
    size: int
    buffer: Tensor
    views: list[Tensor]
    unsummed: Tensor | None = None
    state: GradientState = GradientState.EMPTY
    flat: FlatParameters | None = None
    pending: int | None = None

    @cached_property
    def chunk(self) -> int | None:
        """Return the stage whose backward completes the bucket; None if several contribute."""
        return self.parameters[0].chunk

    @cached_property
    def next_begins(self) -> dict[int, int]:
        """Map the end of each parameter in the buffer to the beginning of the next one."""
        ends = {
            offset + managed.parameter.numel()
            for offset, managed in zip(self.offsets, self.parameters, strict=True)
        }
        return {end - self._begin: aligned(end) - self._begin for end in ends}

    @property
    def is_sharded(self) -> bool:
        """Return True if the buffer holds only this rank's part of the sums."""
        return not self.views

    @cached_property
    def _begin(self) -> int:
        """Return the offset of the buffer in the bucket."""
        return self.reduction.inner.rank * self.buffer.numel() if self.is_sharded else 0

    @cached_property
    def _index_of(self) -> dict[int, int]:
        return {id(managed.parameter): index for index, managed in enumerate(self.parameters)}

    @torch.no_grad()
    def collect(self, parameter: Tensor) -> None:
        """Move a parameter's gradient to those that the next sum takes.

        Usually it is there. It is not if gradients are sharded, or if a backward with
        ``create_graph=True`` or a hook of the user's has replaced ``.grad``.
        """
        gradient = parameter.grad
        if gradient is None:
            return
        index = self._index_of[id(parameter)]
        if not self.is_sharded:
            if gradient is not self.views[index]:
                self.views[index].copy_(gradient)
                parameter.grad = self.views[index]
            return
        if self.unsummed is None:
            self.unsummed = self.buffer.new_zeros(self.size)
        offset = self.offsets[index]
        self.unsummed[offset : offset + parameter.numel()].view(parameter.shape).add_(gradient)
        parameter.grad = None

    def start_sum(self) -> PendingReduction:
        """Prepare the sum of the gradients; if they are sharded, of those collected."""
        if not self.is_sharded:
            return self.reduction.prepare(self.buffer)
        gradients = self.buffer.new_zeros(self.size) if self.unsummed is None else self.unsummed
        self.unsummed = None
        pending = self.reduction.prepare(gradients)
        pending.when_done(partial(self._add, gradients))
        return pending

    def _add(self, gradients: Tensor) -> None:
        """Add this rank's part of summed gradients to the buffer."""
        self.buffer.add_(self.reduction.mine(gradients))

    def mine(self) -> Tensor:
        """Return the part of the buffer that holds the sums after ``finish``."""
        return self.buffer if self.is_sharded else self.reduction.mine(self.buffer)

    def at(self, region: slice) -> Tensor:
        """Return the gradients in a range of the bucket, which the buffer has."""
        return self.buffer[region.start - self._begin : region.stop - self._begin]

    def own_parts(self) -> Iterator[tuple[ManagedParameter, Placement, slice]]:
        """Yield each parameter in ``mine`` with the placement of its part and its range.

        The range is that of the whole bucket.
        """
        start = self._begin + int(self.mine().storage_offset())
        stop = start + self.mine().numel()
        yield from parts_of(self.parameters, self.offsets, start, stop, first=self.reduction.counts)
