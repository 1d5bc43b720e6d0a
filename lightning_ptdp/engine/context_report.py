"""What the ranks of a context group say about a step, each of its slice of the sequence, made into what one process would say."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ptdp._torch import all_gather_single
from lightning_ptdp.context_parallel import ContextParallelError, gather_sequence
from lightning_ptdp.engine.report import LogCall, StepReport, numbers_of, reduce_values
from lightning_ptdp.nested import Nested, map_tensors
from lightning_ptdp.world.mesh import Group

__all__ = ["merge_reports", "whole_outputs"]


def merge_reports(report: StepReport, *, weight: float, group: Group, device: torch.device) -> list[float]:
    """Make the loss and the logged values of this rank's slice those of the whole sequence, in place; collective.

    Args:
        report: Of this rank. Losses that count their tokens are left alone: they are summed with the replicas'.
        weight: This rank's share in its logged values: its tokens, or what stands for them.
        group: The context group.
        device: Where collectives take their tensors.

    Returns:
        The ranks' weights.

    Raises:
        ContextParallelError: The ranks logged different names.
    """
    names = "\n".join(call.name for call in report.calls)
    heads = _gather([float(zlib.crc32(names.encode())), report.loss, weight], group, device)
    if any(head[0] != heads[0][0] for head in heads):
        raise ContextParallelError(
            f"self.log was called with different names on different context ranks (on rank {group.rank} of the group: "
            f"{names.split()}); what a step logs may not depend on which part of the sequence it sees"
        )
    if not report.counted:
        report.loss = sum(head[1] for head in heads) / group.size
    calls, weights = report.calls, [head[2] for head in heads]
    if calls:
        sizes = [float(call.options.get("batch_size") or 0) for call in calls]
        columns = list(zip(*_gather(numbers_of(calls) + sizes, group, device), strict=True))
        of_calls = zip(calls, columns[: len(calls)], columns[len(calls) :], strict=True)
        report.calls = [_merged(call, values, sizes, weights) for call, values, sizes in of_calls]
    return weights


def _merged(call: LogCall, values: Sequence[float], sizes: Sequence[float], weights: Sequence[float]) -> LogCall:
    sized = {} if call.options.get("batch_size") is None else {"batch_size": int(sum(sizes))}
    value = None if call.value is None else reduce_values(values, weights, call.reduction)
    return replace(call, value=value, options={**call.options, **sized})


def _gather(values: Sequence[float], group: Group, device: torch.device) -> list[list[float]]:
    own = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = own.new_empty((group.size * own.numel(),))
    all_gather_single(everyone, own, group.handle)
    rows: list[list[float]] = everyone.view(group.size, -1).tolist()
    return rows


def whole_outputs(outputs: Nested, *, length: int, weights: Sequence[float], group: Group, device: torch.device) -> Nested:
    """A step's outputs for the whole sequence; collective.

    Tensors (b, s/c, ...) are put together along time. Floating-point scalars are averaged by the ranks' weights, ``num_tokens`` is
    summed. Whatever else is a tensor must be equal on all ranks.

    Args:
        outputs: Nested mappings and sequences of this rank.
        length: s, tokens of the whole sequence.
        weights: The ranks' shares in averages.
        group: The context group.
        device: Where collectives take their tensors.

    Raises:
        ContextParallelError: A tensor is neither, so that nothing can be said about the whole sequence.
    """

    def scalar(tensor: Tensor, how: Callable[[Sequence[float]], float]) -> Tensor:
        return tensor.new_tensor(how([row[0] for row in _gather([float(tensor)], group, device)]))

    def whole(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 and tensor.is_floating_point():
            return scalar(tensor, lambda values: reduce_values(values, weights, "mean"))
        if tensor.dim() > 1 and tensor.size(1) == length // group.size:
            return gather_sequence(tensor.to(device), 1, group=group).to(tensor.device)
        rows = _gather(
            [float(zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()))], group, device
        )
        if any(row != rows[0] for row in rows):
            raise ContextParallelError(
                f"an output {tuple(tensor.shape)} of the step differs between context ranks, and nothing says how to put it together: "
                "return tensors (batch, sequence, ...), which are joined along time, or scalars, which are averaged; sums over the "
                "sequence are best logged with self.log(..., reduce_fx='sum')"
            )
        return tensor

    if isinstance(outputs, dict) and "num_tokens" in outputs:
        tokens = torch.as_tensor(outputs["num_tokens"])
        rest = map_tensors({key: value for key, value in outputs.items() if key != "num_tokens"}, whole)
        return {**rest, "num_tokens": scalar(tokens, sum)}
    return map_tensors(outputs, whole)
