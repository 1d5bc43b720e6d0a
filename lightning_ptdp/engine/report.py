"""What a step tells Lightning: the loss, ``self.log`` calls and outputs, born on the last stage and needed on every rank.

The last stage records the calls of every microbatch; afterwards they are put together over the microbatches, sent to the other stages
(sharing.py) and replayed everywhere, so that loggers, the progress bar, ModelCheckpoint and EarlyStopping see the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Number, Real
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp._lightning import LightningModule
from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.world.mesh import Group

__all__ = [
    "LogCall",
    "LogRecorder",
    "StepReport",
    "average_calls",
    "numbers_of",
    "read_numbers",
    "reduce_values",
    "replay",
    "weigh_over_replicas",
]

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}


@dataclass(frozen=True)
class LogCall:
    """One ``self.log(name, value, **options)``.

    Attributes:
        value: A number, a tensor of one element or a Metric object; None where ``metric`` stands for it.
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
        """Whether it is to be the mean of what the replicas log."""
        is_number = self.metric is None and not is_metric(self.value)
        return is_number and bool(self.options.get("sync_dist")) and self.reduction == "mean"


@dataclass
class StepReport:
    """Everything that the last stage says about a step.

    Attributes:
        loss: Sum over microbatches of weight times loss.
        weight: Sum of the weights.
        counted: Whether the weights are token counts that the step returned.
        calls: Recorded and averaged ``self.log`` calls.
        extras: Picklable outputs beside the loss, or None.
        changes: What the step left on the module.
    """

    loss: float = 0.0
    weight: float = 0.0
    counted: bool = False
    calls: list[LogCall] = field(default_factory=list)
    extras: Any = None
    changes: list[Change] = field(default_factory=list)


class LogRecorder:
    """Stands in for ``LightningModule.log`` while a microbatch runs."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall] = []

    def __call__(self, name: str, value: Any, *args: object, **kwargs: Any) -> None:
        """Record a call.

        Raises:
            ValueError: As Lightning's, in the line that logs: the value is no number, tensor of one element or metric.
        """
        if not isinstance(value, Number | Tensor) and not is_metric(value):
            raise ValueError(f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, {value})` was called, but the tensor must have a single element: log its mean, or a metric"
            )
        if args:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
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
        module.log(call.name, call.value if call.metric is None else module.get_submodule(call.metric), **call.options)


def average_calls(
    recorded: Sequence[Sequence[LogCall]],
    numbers: Sequence[float],
    weights: Sequence[float],
    *,
    metric_path: Callable[[object], str],
    counted: bool = False,
) -> list[LogCall]:
    """One call for each call that the microbatches made: weighted mean of the values, or their sum, least or largest as ``reduce_fx``
    asks. A ``batch_size`` that the calls give is added up, since Lightning weights the batches of an epoch by it.

    Args:
        recorded: Calls of every microbatch, in order.
        numbers: What they log, one microbatch after the other; anything for a metric.
        weights: Weight of every microbatch.
        metric_path: Attribute path of a Metric object on the module.
        counted: Whether the weights are token counts; a call's own ``batch_size`` then does not weight its microbatches.

    Raises:
        ValueError: The microbatches logged different names, or one asks for a reduction that Lightning has not.
    """
    names = [[call.name for call in calls] for calls in recorded]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"self.log was called with different names in different microbatches: {names[0]} and others; log the same names"
        )
    merged = []
    for place, calls in enumerate(zip(*recorded, strict=True)):
        first, options, shares = calls[0], calls[0].options, weights
        own = [call.options.get("batch_size") for call in calls]
        if all(size is not None for size in own):
            options = {**options, "batch_size": sum(own)}
            shares = weights if counted else own
        if is_metric(first.value):
            merged.append(LogCall(first.name, None, options, metric_path(first.value)))
            continue
        # By name, since a function may not be picklable.
        reduction = first.reduction
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"self.log({first.name!r}, reduce_fx={reduction}): a logged value can be reduced by {', '.join(_REDUCTIONS)}; log a "
                "torchmetrics.Metric instead"
            )
        value = reduce_values(numbers[place :: len(names[0])], shares, reduction)
        merged.append(LogCall(first.name, value, {**options, "reduce_fx": reduction}))
    return merged


def numbers_of(calls: Sequence[LogCall]) -> list[float]:
    """What they log; 0 for a metric."""
    return read_numbers([call.value for call in calls])[0]


def read_numbers(*rows: Sequence[object]) -> list[list[float]]:
    """Rows of numbers, of which those of a device are read all in one go, since each reading waits for it; 0 for what is no number."""
    tensors: dict[torch.device, list[Tensor]] = {}
    for value in chain(*rows):
        if isinstance(value, Tensor):
            tensors.setdefault(value.device, []).append(value.detach().double().flatten())
    read = {device: iter(torch.cat(values).tolist()) for device, values in tensors.items()}

    def number(value: object) -> float:
        if isinstance(value, Tensor):
            return next(read[value.device])
        return float(value) if isinstance(value, Real) else 0.0

    return [[number(value) for value in row] for row in rows]


def is_metric(value: object) -> bool:
    """Whether a logged value is a torchmetrics object."""
    return hasattr(value, "compute") and hasattr(value, "update")


def weigh_over_replicas(calls: list[LogCall], weight: Tensor, loss: float = 0.0, *, group: Group) -> Tensor:
    """Make the logged means that are shared over replicas those of all replicas' tokens, without reading values from the device;
    collective. All replicas then log the same value, which is what Lightning's own mean over them leaves.

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
    means = [torch.as_tensor(calls[i].value, device=weight.device).detach().double().reshape(()) for i in chosen]
    # Without a token a mean may be 0/0.
    row = torch.stack([count, torch.full_like(count, loss), *(torch.where(count > 0, mean, 0.0) * count for mean in means)])
    dist.all_reduce(row, group=group.handle)
    for i, total, mean in zip(chosen, row[2:], means, strict=True):
        calls[i] = replace(calls[i], value=torch.where(row[0] > 0, total / row[0], mean).float())
    return row[:2]


def reduce_values(values: Sequence[float], weights: Sequence[float], reduction: str) -> float:
    """What logged values of parts of a step say about the whole: their weighted mean, or sum, least or largest."""
    total = sum(weights)
    if reduction != "mean" or not total:
        return _REDUCTIONS[reduction](values)
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total
