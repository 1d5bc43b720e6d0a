"""Merging of the reports of a context group, each for one slice of the sequence.

The merged report equals that of one process.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ptdp.attention import ContextParallelError, gather_sequence
from lightning_ptdp.base.nested import Nested, map_tensors
from lightning_ptdp.engine.step_report import StepReport, numbers_on, reduce_values
from lightning_ptdp.shims.torch_distributed import all_gather_single
from lightning_ptdp.world.mesh import Group

_CAPACITY = 64  # numbers gathered at once, before the ranks know how many values each logs


class PartReports:
    """Converts this rank's loss and logged values to those of the full sequence.

    This rank has one slice of the sequence. The conversion is in place and on the device. It is
    collective.

    Args:
        report: Report of this rank. Losses that count their tokens are left unchanged: they are
            summed together with the replicas' losses.
        weight: This rank's share in its logged values, (): its number of tokens, or a substitute.
        group: The context group.
        device: Device of tensors in collectives.

    Attributes:
        numbers: (n) float64, to be read from the device and passed to ``read``.
    """

    def __init__(
        self, report: StepReport, *, weight: Tensor, group: Group, device: torch.device
    ) -> None:
        self._group = group
        calls = report.calls
        self._names = "\n".join(call.name for call in calls)
        sizes = [call.options.get("batch_size") or 0 for call in calls]
        numbers = [
            zlib.crc32(self._names.encode()),
            report.loss,
            weight,
            report.stops,
            *(call.value for call in calls),
            *sizes,
        ]
        local = numbers_on(device, numbers)
        # A rank that logs other names must still find the other ranks in the same collective.
        gathered = _gather(
            torch.nn.functional.pad(local[:_CAPACITY], (0, max(0, _CAPACITY - len(local)))), group
        )
        if len(local) > _CAPACITY:
            self._check(gathered[:, 0].tolist())
            gathered = torch.cat([gathered, _gather(local[_CAPACITY:], group)], 1)
        values = gathered[:, 4 : 4 + len(calls)]
        if not report.counted:
            report.loss = gathered[:, 1].mean()
        rank_weights = gathered[:, 2]
        report.calls = [
            call
            if call.value is None
            else replace(call, value=reduce_values(values[:, i], rank_weights, call.reduction))
            for i, call in enumerate(calls)
        ]
        totals = gathered[:, 4 + len(calls) : len(local)].sum(0)
        stops = gathered[:, 3].sum(0, keepdim=True)
        self.numbers = torch.cat([gathered[:, 0], rank_weights, stops, totals])

    def read(self, report: StepReport, numbers: Sequence[float]) -> list[float]:
        """Store the numbers in ``report`` and return the ranks' weights.

        Raises:
            ContextParallelError: The ranks logged different names.
        """
        size = self._group.size
        names = numbers[:size]
        weights = numbers[size : 2 * size]
        stops, *totals = numbers[2 * size :]
        self._check(names)
        report.stops = stops > 0
        report.calls = [
            call
            if call.options.get("batch_size") is None
            else replace(call, options={**call.options, "batch_size": int(total)})
            for call, total in zip(report.calls, totals, strict=True)
        ]
        return list(weights)

    def _check(self, names: Sequence[float]) -> None:
        if any(name != names[0] for name in names):
            raise ContextParallelError(
                "self.log was called with different names on different context ranks (on rank "
                f"{self._group.rank} of the group: {self._names.split()}). Logged names must "
                "not depend on the rank's slice of the sequence"
            )


def _gather(local: Tensor, group: Group) -> Tensor:
    """Return the numbers of all ranks, (n) -> (c, n)."""
    gathered = local.new_empty((group.size * local.numel(),))
    all_gather_single(gathered, local.contiguous(), group.handle)
    return gathered.view(group.size, -1)


def full_outputs(
    outputs: Nested,
    *,
    length: int,
    weights: Sequence[float],
    group: Group,
    device: torch.device,
) -> Nested:
    """Return a step's outputs for the full sequence; collective.

    Tensors (b, s/c, ...) are joined along time. Floating-point scalars are averaged with the ranks'
    weights. Every other tensor must be equal on all ranks.

    Args:
        outputs: Nested mappings and sequences of this rank.
        length: s, tokens of the full sequence.
        weights: The ranks' shares in averages.
        group: The context group.
        device: Device of tensors in collectives.

    Raises:
        ContextParallelError: A tensor can be neither joined nor averaged and differs between ranks.
    """

    rank_weights = numbers_on(device, weights)

    def full(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 and tensor.is_floating_point():
            values = _gather(numbers_on(device, [tensor]), group)[:, 0]
            return reduce_values(values, rank_weights, "mean").to(
                tensor.device, tensor.dtype, non_blocking=tensor.is_cuda
            )
        if tensor.dim() > 1 and tensor.size(1) == length // group.size:
            return gather_sequence(tensor.to(device), 1, group=group).to(tensor.device)
        content = zlib.crc32(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
        if len(set(_gather(numbers_on(device, [content]), group)[:, 0].tolist())) > 1:
            raise ContextParallelError(
                f"an output {tuple(tensor.shape)} of the step differs between context ranks "
                "and cannot be combined. Return tensors (batch, sequence, ...), which are "
                "concatenated, or scalars, which are averaged. Log sums over the sequence "
                "with self.log(..., reduce_fx='sum')"
            )
        return tensor

    return map_tensors(outputs, full)
