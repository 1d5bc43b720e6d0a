"""Results of a step for Lightning: the loss, ``self.log`` calls and outputs, made on the last stage
and needed on every rank.

The last stage records the calls of every microbatch; afterwards they are put together over the
microbatches, sent to the other stages (sharing.py) and replayed everywhere, so that loggers, the
progress bar, ModelCheckpoint and EarlyStopping see the same on all ranks.
Whoever reads a value waits for the device: all is computed there, and read in one go at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Number, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.world.mesh import Group

__all__ = [
    "LogCall",
    "LogRecorder",
    "StepReport",
    "average_calls",
    "numbers_on",
    "read_numbers",
    "reduce_values",
    "replay",
    "weigh_over_replicas",
]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


@dataclass(frozen=True)
class LogCall:
    """One ``self.log(name, value, **options)``.

    Attributes:
        value: A number, a tensor of one element or a Metric object; None where ``metric`` stands
            for it.
        metric: Attribute path of a Metric object on the module.
    """

    name: str
    value: Any
    options: dict[str, Any]
    metric: str | None = None

    @property
    def reduction(self) -> str:
        """Its ``reduce_fx``: "mean", "sum", "min" or "max", or what else was given."""
        asked = self.options.get("reduce_fx", "mean")
        name: str = getattr(asked, "__name__", str(asked)).lower()
        return "mean" if name == "avg" else name

    @property
    def is_shared_mean(self) -> bool:
        """Return True if the replicas' logged values are to be averaged."""
        is_number = self.metric is None and not is_metric(self.value)
        is_shared = bool(self.options.get("sync_dist")) and not self.options.get("rank_zero_only")
        return is_number and is_shared and self.reduction == "mean"


@dataclass
class StepReport:
    """Everything that the last stage says about a step. Numbers are tensors () of float64 on the
    device until they are read.

    Attributes:
        loss: Sum over microbatches of weight times loss.
        weight: Sum of the weights.
        counted: Whether the weights are token counts that the step returned.
        calls: Recorded and averaged ``self.log`` calls.
        extras: Picklable outputs beside the loss, or None.
        changes: What the step left on the module.
        spread: Numbers of labels, if asked for; stays on this rank.
    """

    loss: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    counted: bool = False
    calls: list[LogCall] = field(default_factory=list)
    extras: Any = None
    changes: list[Change] = field(default_factory=list)
    spread: Sequence[float] = ()


class LogRecorder:
    """Stands in for ``LightningModule.log`` while a microbatch runs."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall] = []

    def __call__(self, name: str, value: Any, *args: object, **kwargs: Any) -> None:
        """Record a call.

        Raises:
            ValueError: As Lightning's, in the line that logs: the value is no number, tensor of one
                element or metric.
        """
        if not isinstance(value, Number | Tensor) and not is_metric(value):
            raise ValueError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values "
                "cannot be logged"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, {value})` was called, but the tensor must have a single "
                "element: log its mean, or a metric"
            )
        if args:
            names = (
                "prog_bar",
                "logger",
                "on_step",
                "on_epoch",
                "reduce_fx",
                "enable_graph",
                "sync_dist",
            )
            kwargs.update(zip(names, args, strict=False))
        keeps_graph = not isinstance(value, Tensor) or kwargs.get("enable_graph", False)
        self.calls.append(LogCall(name, value if keeps_graph else value.detach(), kwargs))

    def __enter__(self) -> LogRecorder:
        self._module.__dict__["log"] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._module.__dict__.pop("log", None)


def replay(calls: Sequence[LogCall], module: LightningModule) -> None:
    """Hand the calls to Lightning."""
    for call in calls:
        value = call.value if call.metric is None else module.get_submodule(call.metric)
        if isinstance(value, float):
            # Stays here, where whoever looks at it need not wait, if Lightning does not share it.
            device = module.device if call.options.get("sync_dist") else "cpu"
            value = torch.tensor(value).to(device, non_blocking=True)
        module.log(call.name, value, **call.options)


def average_calls(
    recorded: Sequence[Sequence[LogCall]],
    numbers: Tensor,
    weights: Tensor,
    *,
    metric_path: Callable[[object], str],
    counted: bool = False,
    losses: Tensor | None = None,
) -> list[LogCall]:
    """One call for each call that the microbatches made: weighted mean of the values, or their sum,
    least or largest as ``reduce_fx`` asks. A ``batch_size`` that the calls give is added up, since
    Lightning weights the batches of an epoch by it.

    Args:
        recorded: Calls of every microbatch, in order.
        numbers: What they log, one microbatch after the other, (m * calls) float64; anything for a
            metric.
        weights: Weight of every microbatch, (m) float64.
        metric_path: Attribute path of a Metric object on the module.
        counted: Whether the weights are token counts.
        losses: Of the microbatches, (m) float64, where they are means over these tokens. What logs
            them is weighted by tokens, whatever its ``batch_size`` says; another call that gives
            one, such as a mean over samples, is weighted by it.

    Raises:
        ValueError: The microbatches logged different names, or one asks for a reduction that
            Lightning has not.
    """
    names = [[call.name for call in calls] for calls in recorded]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"self.log was called with different names in different microbatches: {names[0]} and "
            "others; log the same names"
        )
    merged = []
    for place, calls in enumerate(zip(*recorded, strict=True)):
        first, options, shares = calls[0], calls[0].options, weights
        own = [call.options.get("batch_size") for call in calls]
        if all(size is not None for size in own):
            options = {**options, "batch_size": sum(own)}
            shares = numbers_on(numbers.device, own)
            if counted:
                shares = (
                    weights
                    if losses is None
                    else _shares_of(numbers[place :: len(names[0])], losses, weights, shares)
                )
        if is_metric(first.value):
            merged.append(LogCall(first.name, None, options, metric_path(first.value)))
            continue
        # By name, since a function may not be picklable.
        reduction = first.reduction
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"self.log({first.name!r}, reduce_fx={reduction}): a logged value can be reduced "
                f"by {', '.join(_REDUCTIONS)}; log a "
                "torchmetrics.Metric instead"
            )
        value = reduce_values(numbers[place :: len(names[0])], shares, reduction)
        merged.append(LogCall(first.name, value, {**options, "reduce_fx": reduction}))
    return merged


def _shares_of(values: Tensor, losses: Tensor, tokens: Tensor, own: Tensor) -> Tensor:
    """Return ``tokens`` if the values are the losses, else ``own``; without reading them from the
    device."""
    is_loss = (torch.isclose(values, losses) | (tokens == 0)).all()
    return torch.where(is_loss, tokens, own)


def numbers_on(device: torch.device, values: Sequence[object]) -> Tensor:
    """Numbers and tensors of one element as (n) float64 on ``device``, without waiting for it; 0
    for what is neither."""
    numbers = torch.tensor(
        [float(v) if isinstance(v, Real) else 0.0 for v in values], dtype=torch.float64
    )
    numbers = numbers.to(device, non_blocking=True)
    if not any(isinstance(value, Tensor) for value in values):
        return numbers
    parts = zip(values, numbers.split(1), strict=True)
    return torch.cat(
        [
            v.detach().to(device, torch.float64, non_blocking=True).reshape(1)
            if isinstance(v, Tensor)
            else number
            for v, number in parts
        ]
    )


def read_numbers(*rows: Tensor) -> list[list[float]]:
    """Rows of a device, (n) float64 each, in one go."""
    numbers = iter(torch.cat(rows).tolist())
    return [list(islice(numbers, row.numel())) for row in rows]


def is_metric(value: object) -> bool:
    """Return True if a logged value is a torchmetrics object."""
    return hasattr(value, "compute") and hasattr(value, "update")


def weigh_over_replicas(
    calls: list[LogCall], weight: Tensor, loss: Tensor | float = 0.0, *, group: Group
) -> Tensor:
    """Make the logged means that are shared over replicas those of all replicas' tokens, without
    reading values from the device; collective. All replicas then log the same value, which is what
    Lightning's own mean over them leaves.

    Args:
        calls: Of this replica, changed in place.
        weight: Tokens that it counted, ().
        loss: Its sum over them.
        group: The replicas.

    Returns:
        All replicas' tokens and loss, (2) float64.
    """
    count = weight.detach().double()
    chosen = [i for i, call in enumerate(calls) if call.is_shared_mean]
    means = [
        torch.as_tensor(calls[i].value, device=weight.device).detach().double().reshape(())
        for i in chosen
    ]
    # Without a token a mean may be 0/0.
    loss = loss if isinstance(loss, Tensor) else torch.full_like(count, loss)
    row = torch.stack([count, loss, *(torch.where(count > 0, mean, 0.0) * count for mean in means)])
    dist.all_reduce(row, group=group.handle)
    for i, total, mean in zip(chosen, row[2:], means, strict=True):
        calls[i] = replace(calls[i], value=torch.where(row[0] > 0, total / row[0], mean).float())
    return row[:2]


def reduce_values(values: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """Combine values logged by parts of a step, (n), to one value, (): their weighted mean, sum,
    minimum or maximum."""
    if reduction != "mean":
        return _REDUCTIONS[reduction](values)
    total = weights.sum()
    # What weighs nothing may be 0/0.
    return torch.where(
        total != 0, torch.where(weights != 0, values * weights, 0.0).sum() / total, values.mean()
    )
