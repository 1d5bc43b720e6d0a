"""What a step tells Lightning: the loss, ``self.log`` calls and outputs, born on the last stage and needed on every rank.

The last stage records the calls of every microbatch; afterwards they are put together over the microbatches, sent to the other stages
(sharing.py) and replayed everywhere, so that loggers, the progress bar, ModelCheckpoint and EarlyStopping see the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.world.mesh import Group

__all__ = [
    "LogCall",
    "LogRecorder",
    "StepReport",
    "average_calls",
    "reduce_values",
    "reduction_name",
    "weigh_over_replicas",
    "weigh_recorded",
]

_REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True)
class LogCall:
    """One ``self.log(name, value, **options)``; a Metric object is recorded by its attribute path with value None."""

    name: str
    value: float | None
    options: dict[str, Any]
    metric: str | None = None


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

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
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
        self.calls.append((name, value if keeps_graph else value.detach(), kwargs))

    def replay(self) -> None:
        """Hand the calls to Lightning."""
        for name, value, options in self.calls:
            self._module.log(name, value, **options)

    def __enter__(self) -> LogRecorder:
        self._module.__dict__["log"] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._module.__dict__.pop("log", None)


def average_calls(
    recorded: Sequence[Sequence[tuple[str, Any, dict[str, Any]]]],
    weights: Sequence[float],
    *,
    metric_path: Callable[[Any], str],
    counted: bool = False,
) -> list[LogCall]:
    """One call for each call that the microbatches made: weighted mean of the values, or their sum, least or largest as ``reduce_fx``
    asks. A ``batch_size`` that the calls give is added up, since Lightning weights the batches of an epoch by it.

    Args:
        recorded: Calls of every microbatch, in order.
        weights: Weight of every microbatch.
        metric_path: Attribute path of a Metric object on the module.
        counted: Whether the weights are token counts; a call's own ``batch_size`` then does not weight its microbatches.

    Raises:
        ValueError: The microbatches logged different names, or one asks for a reduction that Lightning has not.
    """
    names = [[name for name, _, _ in calls] for calls in recorded]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"self.log was called with different names in different microbatches: {names[0]} and others; log the same names"
        )
    merged = []
    values = _numbers([value for calls in recorded for _, value, _ in calls if not is_metric(value)])
    columns = [[0.0 if is_metric(value) else next(values) for _, value, _ in calls] for calls in recorded]
    for place, calls in enumerate(zip(*recorded, strict=True)):
        name, first, options = calls[0]
        shares = weights
        own = [call_options.get("batch_size") for _, _, call_options in calls]
        if all(size is not None for size in own):
            options = {**options, "batch_size": sum(own)}
            shares = weights if counted else own
        if is_metric(first):
            merged.append(LogCall(name, None, options, metric_path(first)))
            continue
        # By name, since a function may not be picklable.
        options = {**options, "reduce_fx": _checked(reduction_name(options), name)}
        merged.append(LogCall(name, reduce_values([column[place] for column in columns], shares, options["reduce_fx"]), options))
    return merged


def is_metric(value: Any) -> bool:
    """Whether a logged value is a torchmetrics object."""
    return hasattr(value, "compute") and hasattr(value, "update")


def _numbers(values: Sequence[Any]) -> Iterator[float]:
    """The logged values as floats, those on a device read in one go."""
    tensors = [value.detach().double().flatten() for value in values if isinstance(value, Tensor)]
    read = iter(torch.cat(tensors).tolist() if tensors else ())
    return (next(read) if isinstance(value, Tensor) else float(value) for value in values)


def _checked(reduction: str, name: str) -> str:
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"self.log({name!r}, reduce_fx={reduction}): a logged value can be reduced by {', '.join(_REDUCTIONS)}; log a "
            "torchmetrics.Metric instead"
        )
    return reduction


def is_shared_mean(options: Mapping[str, Any]) -> bool:
    """Whether a logged value is to be the mean of what the replicas log."""
    return bool(options.get("sync_dist")) and reduction_name(options) == "mean"


def reduction_name(options: Mapping[str, Any]) -> str:
    """The ``reduce_fx`` of a log call: "mean", "sum", "min" or "max", or what else was given."""
    asked = options.get("reduce_fx", "mean")
    name = getattr(asked, "__name__", str(asked)).lower()
    return "mean" if name == "avg" else name


def weigh_over_replicas(report: StepReport, *, group: Group, device: torch.device) -> None:
    """Make the loss, and the logged means that are shared over replicas, those of all replicas' tokens, in place; collective.

    All replicas then log the same value, which is what Lightning's own mean over them leaves.
    """
    chosen = [i for i, call in enumerate(report.calls) if call.value is not None and is_shared_mean(call.options)]
    # Without a token a mean may be 0/0.
    sums = [(report.calls[i].value or 0.0) * report.weight if report.weight else 0.0 for i in chosen]
    row = torch.tensor([report.loss, report.weight, *sums], dtype=torch.float64, device=device)
    dist.all_reduce(row, group=group.handle)
    report.loss, report.weight, *sums = row.tolist()
    for i, total in zip(chosen, sums, strict=True):
        report.calls[i] = replace(report.calls[i], value=total / report.weight if report.weight else report.calls[i].value)


def weigh_recorded(calls: list[tuple[str, Any, dict[str, Any]]], tokens: Tensor, *, group: Group) -> Tensor:
    """As ``weigh_over_replicas``, of calls that were recorded, without reading values from the device.

    Args:
        calls: Of this replica, changed in place.
        tokens: That it counted, ().
        group: The replicas.

    Returns:
        All replicas' tokens, () float64.
    """
    chosen = [i for i, (_, value, options) in enumerate(calls) if not is_metric(value) and is_shared_mean(options)]
    count = tokens.detach().double()
    means = [torch.as_tensor(calls[i][1], device=tokens.device).detach().double().reshape(()) for i in chosen]
    row = torch.stack([count, *(torch.where(count > 0, mean, 0.0) * count for mean in means)])
    dist.all_reduce(row, group=group.handle)
    for i, total in zip(chosen, row[1:], strict=True):
        name, _, options = calls[i]
        calls[i] = name, (total / row[0]).float(), options
    return row[0]


def reduce_values(values: Sequence[float], weights: Sequence[float], reduction: str) -> float:
    """What logged values of parts of a step say about the whole: their weighted mean, or sum, least or largest."""
    if reduction == "sum":
        return sum(values)
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total
