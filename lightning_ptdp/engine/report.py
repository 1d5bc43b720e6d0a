"""What a step tells Lightning: the loss, ``self.log`` calls and outputs, born on the last stage and needed on every rank.

The last stage records the calls of every microbatch; afterwards they are averaged over the microbatches, sent to the other stages and
replayed everywhere, so that loggers, the progress bar, ModelCheckpoint and EarlyStopping see the same values on all ranks. The values
travel as one small tensor, tensors as another; names, options and forms are only sent again when they change.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.engine.parcel import TensorPlace, empty_message, pack, tensors_of, to_bytes, unpack
from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.mesh import Group

__all__ = [
    "LogCall",
    "LogRecorder",
    "ReportMemory",
    "StepReport",
    "average_calls",
    "reduce_values",
    "share_report",
]

_REDUCTIONS = ("mean", "sum", "min", "max")
_CAPACITY = 62  # values that fit into the fixed-size message; longer reports take a second one


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


@dataclass
class ReportMemory:
    """Form of the last report, kept by sender and receivers so that it need not be sent again."""

    form: bytes = b""


@dataclass(frozen=True)
class _Form:
    """What a report says beside numbers and tensors.

    Attributes:
        rows: Of each log call its name, options, metric and whether it has a value.
        rest: Outputs and changes, packed.
        places: Of their tensors.
    """

    rows: list[tuple[str, dict[str, Any], str | None, bool]]
    rest: bytes
    places: list[TensorPlace]


def share_report(
    report: StepReport | None, *, group: Group, source: int, memory: ReportMemory, device: torch.device
) -> StepReport:
    """Broadcast the report of ``source``, the member with the last stage, over the pipeline group; the others give None."""
    if group.size == 1:
        assert report is not None
        return report
    source = group.ranks[source]
    head = torch.zeros(_CAPACITY + 4, dtype=torch.float64)
    values: list[float] = []
    tensors: list[Tensor] = []
    if report is not None:
        values = [call.value for call in report.calls if call.value is not None]
        form, tensors = _form_of(report, device)
        head[:4] = torch.tensor(
            [report.loss, report.weight, float(report.counted), float(form != memory.form)], dtype=torch.float64
        )
        head[4 : 4 + min(len(values), _CAPACITY)] = torch.tensor(values[:_CAPACITY], dtype=torch.float64)
        memory.form = form
    head = head.to(device)
    dist.broadcast(head, source, group=group.handle)
    loss, weight, counted, form_changed, *numbers = head.tolist()
    if form_changed:
        memory.form = _broadcast_object(memory.form, source, group)
    content: _Form = pickle.loads(memory.form)
    if sum(row[3] for row in content.rows) > _CAPACITY:
        numbers = _broadcast_object(values, source, group)
    message = to_bytes(tensors, content.places, device) if report is not None else empty_message(content.places, device)
    if message.numel():
        dist.broadcast(message, source, group=group.handle)
    if report is not None:
        return report
    stream = iter(numbers)
    calls = [LogCall(name, next(stream) if known else None, options, metric) for name, options, metric, known in content.rows]
    extras, changes = unpack(content.rest, tensors_of(message, content.places))
    return StepReport(loss, weight, bool(counted), calls, extras, changes)


def _form_of(report: StepReport, device: torch.device) -> tuple[bytes, list[Tensor]]:
    try:
        rest, tensors = pack((report.extras, report.changes))
    except Exception:
        rest, tensors = pack((report.extras, [change for change in report.changes if _can_be_sent(change)]))
    places = [TensorPlace(tuple(t.shape), t.dtype, t.device != device) for t in tensors]
    rows = [(call.name, call.options, call.metric, call.value is not None) for call in report.calls]
    return pickle.dumps(_Form(rows, rest, places)), tensors


def _can_be_sent(change: Change) -> bool:
    try:
        pack(change)
    except Exception as error:
        warnings.warn(
            f"the step changed {change.name}, which cannot be sent to the other pipeline stages: it is as it was there ({error}). Keep "
            "numbers, tensors and containers of them",
            stacklevel=2,
        )
        return False
    return True


def _broadcast_object(value: Any, source: int, group: Group) -> Any:
    box = [value]
    dist.broadcast_object_list(box, source, group=group.handle)
    return box[0]
