"""Unsharded copies of tensor-parallel parameters, for optimizers that need full matrices.

Before the step the ranks of a tensor group gather the gradients. Each then makes the same step on
the full parameter, and keeps its part of the result. A rank therefore holds the optimizer's states
of full parameters, t times as many as with an elementwise optimizer. With a sharded optimizer it
does so for the parameters that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.shims.torch_distributed import all_gather_single
from lightning_ptdp.world.mesh import Group


class FullMatrices:
    """Unsharded parameters of one rank; replaces the tensors on which the optimizer steps.

    Args:
        parameters: Parameters that are cut; the same on all ranks of the tensor group.
        group: The tensor group.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], group: Group) -> None:
        self._group = group
        self._pieces = group.gather([managed.placement.pieces for managed in parameters])
        self._numbers = {managed: number for number, managed in enumerate(parameters)}
        self._gradients = {managed: managed.gradient for managed in parameters}
        local = []
        for managed in parameters:
            assert managed.stepped is not None
            local.append(managed.stepped.detach())
        full_tensors = self._gathered(parameters, local)
        for managed, values, full in zip(parameters, local, full_tensors, strict=True):
            placement = _full_placement(managed, first=group.rank == 0)
            rounded = values if managed.rounded is None else managed.rounded
            managed.step_on(nn.Parameter(full), placement, rounded=rounded)

    def __contains__(self, managed: ManagedParameter) -> bool:
        """Return True if this object replaces the tensor of ``managed``."""
        return managed in self._numbers

    def set_grad(self) -> None:
        """Give the full gradients to the optimizer; collective."""
        shown = []
        gradients = []
        for managed, gradient in self._gradients.items():
            gradient = managed.parameter.grad if gradient is None else gradient
            assert managed.stepped is not None
            managed.stepped.grad = None
            if gradient is not None:
                shown.append(managed)
                gradients.append(gradient.to(managed.stepped.dtype))
        for managed, full in zip(shown, self._gathered(shown, gradients), strict=True):
            assert managed.stepped is not None
            managed.stepped.grad = full

    def publish(self) -> None:
        """Take this rank's parts of the stepped parameters."""
        for managed in self._numbers:
            rounded, stepped = _tensors(managed)
            rounded.copy_(slice_full(stepped, managed.placement))

    def take_values(self) -> None:
        """Take what the user's code has written since ``publish``; collective.

        The values are compared, because a write through ``.data`` leaves no other trace.
        """
        if not self._numbers:
            return
        differences = []
        for managed in self._numbers:
            rounded, stepped = _tensors(managed)
            published = slice_full(stepped, managed.placement).to(rounded.dtype)
            differences.append((published != rounded).any())
        written = torch.stack(differences).any().to(torch.int32)
        dist.all_reduce(written, op=dist.ReduceOp.MAX, group=self._group.handle)
        if written:
            self.reload()

    def reload(self) -> None:
        """Update the full parameters where this rank's parts were changed outside; collective."""
        parameters = list(self._numbers)
        changed = [_tensors(managed)[0] for managed in parameters]
        for managed, full in zip(parameters, self._gathered(parameters, changed), strict=True):
            rounded, stepped = _tensors(managed)
            kept = stepped.to(rounded.dtype) == full.to(rounded.dtype)
            stepped.data.copy_(torch.where(kept, stepped, full.to(stepped.dtype)))

    @torch.no_grad()
    def _gathered(
        self, parameters: Sequence[ManagedParameter], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the full tensors of this rank's parts, by one message."""
        if not parameters:
            return []
        dtype = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        received = flat.new_empty(self._group.size * flat.numel())
        all_gather_single(received, flat, self._group.handle)
        full_tensors = []
        begin = 0
        for managed, tensor in zip(parameters, tensors, strict=True):
            full = tensor.new_empty(managed.placement.full_shape)
            for rank, pieces in enumerate(self._pieces):
                start = rank * flat.numel() + begin
                part = received[start : start + tensor.numel()].view(tensor.shape)
                for piece in pieces[self._numbers[managed]]:
                    full[piece.in_full.slices] = part[piece.in_local.slices].to(full.dtype)
            full_tensors.append(full)
            begin += tensor.numel()
        return full_tensors


def _tensors(managed: ManagedParameter) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a parameter, and the full one."""
    assert managed.rounded is not None
    assert managed.stepped is not None
    return managed.rounded, managed.stepped


def _full_placement(managed: ManagedParameter, *, first: bool) -> Placement:
    """Return the placement of the full parameter; ``first``: of this rank in the tensor group."""
    held = managed.stepped_placement
    full = Placement.replicated(held.full_shape, partial=held.partial)
    return replace(
        full,
        sharded=tuple(axis for axis in held.sharded if axis != "tensor"),
        data_axes=held.data_axes,
        first_in_replica=held.first_in_replica and first,
        first_in_block=held.first_in_block,
    )
