"""What a step tells Lightning: the loss, ``self.log`` calls and outputs, born on the last stage and needed on every rank.

The last stage records the calls of every microbatch; afterwards they are averaged over the microbatches, sent to the other stages and
replayed everywhere, so that loggers, the progress bar, ModelCheckpoint and EarlyStopping see the same values on all ranks. The values
travel as one small tensor; their names and options are only sent again when they change.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.mesh import Group

__all__ = [
    "LogCall",
    "LogRecorder",
    "MetricState",
    "ReportMemory",
    "StepReport",
    "average_calls",
    "reduce_values",
    "share_report",
]

_CAPACITY = 62  # values that fit into the fixed-size message; longer reports take a second one


@dataclass(frozen=True)
class LogCall:
    """One ``self.log(name, value, **options)``; a Metric object is recorded by its attribute path with value None."""

    name: str
    value: float | None
    options: dict[str, Any]
    metric: str | None = None


@dataclass
class MetricState:
    """State of a torchmetrics object after a step, to be copied to the stages that did not update it."""

    path: str
    state: dict[str, Any]
    update_count: int


@dataclass
class StepReport:
    """Everything that the last stage says about a step.

    Attributes:
        loss: Sum over microbatches of weight times loss.
        weight: Sum of the weights.
        counted: Whether the weights are token counts that the step returned.
        calls: Recorded and averaged ``self.log`` calls.
        extras: Picklable outputs beside the loss, or None.
        metrics: States of the logged metric objects.
    """

    loss: float = 0.0
    weight: float = 0.0
    counted: bool = False
    calls: list[LogCall] = field(default_factory=list)
    extras: Any = None
    metrics: list[MetricState] = field(default_factory=list)


class LogRecorder:
    """Stands in for ``LightningModule.log`` while a microbatch runs."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
            kwargs.update(zip(names, args, strict=False))
        self.calls.append((name, value.detach() if isinstance(value, Tensor) else value, kwargs))

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
        ValueError: The microbatches logged different names.
    """
    names = [[name for name, _, _ in calls] for calls in recorded]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"self.log was called with different names in different microbatches: {names[0]} and others; log the same names"
        )
    merged = []
    for calls in zip(*recorded, strict=True):
        name, first, options = calls[0]
        shares = weights
        own = [call_options.get("batch_size") for _, _, call_options in calls]
        if all(size is not None for size in own):
            options = {**options, "batch_size": sum(own)}
            shares = weights if counted else own
        if hasattr(first, "compute") and hasattr(first, "update"):
            merged.append(LogCall(name, None, options, metric_path(first)))
            continue
        values = [float(value) for _, value, _ in calls]
        merged.append(LogCall(name, reduce_values(values, shares, options.get("reduce_fx", "mean")), options))
    return merged


def reduce_values(values: Sequence[float], weights: Sequence[float], reduce_fx: Any) -> float:
    """What logged values of parts of a step say about the whole: their weighted mean, or sum, least or largest."""
    how = getattr(reduce_fx, "__name__", reduce_fx)
    if how == "sum":
        return sum(values)
    if how in ("min", "max"):
        return min(values) if how == "min" else max(values)
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total


@dataclass
class ReportMemory:
    """Structure of the last report, kept by sender and receivers so that it need not be sent again."""

    structure: bytes = b""


def share_report(
    report: StepReport | None, *, group: Group, source: int, memory: ReportMemory, device: torch.device
) -> StepReport:
    """Broadcast the report of ``source``, the member with the last stage, over the pipeline group; the others give None."""
    if group.size == 1:
        assert report is not None
        return report
    source = group.ranks[source]
    head = torch.zeros(_CAPACITY + 5, dtype=torch.float64)
    values: list[float] = []
    if report is not None:
        values = [call.value for call in report.calls if call.value is not None]
        structure = pickle.dumps([(c.name, c.options, c.metric, c.value is None) for c in report.calls])
        changed = structure != memory.structure
        loose = report.extras is not None or bool(report.metrics)
        flags = [float(report.counted), float(changed), float(loose)]
        head[:5] = torch.tensor([report.loss, report.weight, *flags], dtype=torch.float64)
        head[5 : 5 + min(len(values), _CAPACITY)] = torch.tensor(values[:_CAPACITY], dtype=torch.float64)
        memory.structure = structure
    head = head.to(device)
    dist.broadcast(head, source, group=group.handle)
    loss, weight, counted, changed_flag, loose_flag, *numbers = head.tolist()
    if changed_flag:
        memory.structure = _broadcast_object(memory.structure, source, group)
    rows = pickle.loads(memory.structure) if memory.structure else []
    count = sum(not row[3] for row in rows)
    if count > _CAPACITY:
        numbers = _broadcast_object(values, source, group)
    extras, metrics = (None, [])
    if loose_flag:
        extras, metrics = _broadcast_object((report.extras, report.metrics) if report is not None else None, source, group)
    if report is not None:
        return report
    stream = iter(numbers)
    calls = [LogCall(name, None if is_metric else next(stream), options, metric) for name, options, metric, is_metric in rows]
    return StepReport(loss, weight, bool(counted), calls, extras, metrics)


def _broadcast_object(value: Any, source: int, group: Group) -> Any:
    box = [value]
    dist.broadcast_object_list(box, source, group=group.handle)
    return box[0]
