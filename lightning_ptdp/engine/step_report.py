"""Results of a step for Lightning: the loss, ``self.log`` calls and outputs.

They are made on the last stage and needed on every rank. The last stage records the calls of every
microbatch. Afterwards the calls are combined over the microbatches, sent to the other stages
(sharing.py) and replayed everywhere, so that loggers, the progress bar, ModelCheckpoint and
EarlyStopping get the same values on all ranks. Reading a value waits for the device, so all values
are computed on the device and read together. A GPU computes them right after the last forward, on a
stream of their own, so that the host does not wait for the backwards that are queued after it.
"""

from __future__ import annotations

import contextlib
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
        value: A number, a tensor of one element or a Metric object; None if ``metric`` is set.
        metric: Attribute path of a Metric object on the module.
    """

    name: str
    value: Any
    options: dict[str, Any]
    metric: str | None = None

    @property
    def reduction(self) -> str:
        """Return its ``reduce_fx``: "mean", "sum", "min", "max", or another function's name."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name: str = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
        return "mean" if name == "avg" else name

    @property
    def is_replica_mean(self) -> bool:
        """Return True if the replicas' logged values are to be averaged."""
        is_number = self.metric is None and not is_metric(self.value)
        is_shared = bool(self.options.get("sync_dist")) and not self.options.get("rank_zero_only")
        return is_number and is_shared and self.reduction == "mean"


@dataclass
class StepReport:
    """Report of the last stage about a step.

    Numbers are tensors () of float64 on the device until they are read.

    Attributes:
        loss: Sum over microbatches of weight times loss.
        weight: Sum of the weights.
        counted: Whether the weights are token counts that the step returned.
        calls: Recorded and averaged ``self.log`` calls.
        extras: Picklable outputs other than the loss, or None.
        changes: Changes that the step made on the module.
        spread: Numbers of labels, if requested; stays on this rank.
        logger_calls: Recorded calls of loggers (step_loggers.py).
        stops: Whether ``trainer.should_stop`` is set after the step.
    """

    loss: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    counted: bool = False
    calls: list[LogCall] = field(default_factory=list)
    extras: Any = None
    changes: list[Change] = field(default_factory=list)
    spread: Sequence[float] = ()
    logger_calls: list[bytes] = field(default_factory=list)
    stops: bool = False


class ReportStream:
    """Stream of a GPU on which reports are computed, sent and read; a CPU has none.

    A read waits only for what was queued on its own stream. Values of this stream must be read
    before another stream uses them.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_apart(self) -> bool:
        """Return True if the device can compute a report concurrently with other work."""
        return self._stream is not None

    def entered(self, *, after: bool = False) -> contextlib.AbstractContextManager[object]:
        """Return the context of work on this stream.

        With ``after``, it waits for the work queued on the current stream so far.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        if after:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)


class LogRecorder:
    """Replacement of ``LightningModule.log`` while a microbatch runs."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: list[LogCall] = []

    def __call__(self, name: str, value: Any, *args: object, **kwargs: Any) -> None:
        """Record a call.

        Raises:
            ValueError: Like Lightning's error, in the line that logs: the value is no number,
                tensor of one element or metric.
        """
        if not isinstance(value, Number | Tensor) and not is_metric(value):
            raise ValueError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values "
                "cannot be logged"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, {value})` was called, but the tensor must have a single "
                "element. Log its mean, or a metric"
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
                "sync_dist_group",
                "add_dataloader_idx",
                "batch_size",
                "metric_attribute",
                "rank_zero_only",
            )
            kwargs.update(zip(names, args, strict=False))
        keeps_graph = not isinstance(value, Tensor) or kwargs.get("enable_graph", False)
        self.calls.append(LogCall(name, value if keeps_graph else value.detach(), kwargs))

    def __enter__(self) -> LogRecorder:
        self._module.__dict__["log"] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._module.__dict__.pop("log", None)


def replay(calls: Sequence[LogCall], module: LightningModule, *, shared: bool) -> None:
    """Pass the calls to Lightning.

    Lightning shares the values with other ranks, if a call requests it, only with ``shared``.
    """
    for call in calls:
        value = call.value if call.metric is None else module.get_submodule(call.metric)
        options = call.options if shared else {**call.options, "sync_dist": False}
        if isinstance(value, float):
            # It stays on the CPU, where reading it does not wait, unless Lightning shares it.
            device = module.device if options.get("sync_dist") else "cpu"
            value = torch.tensor(value).to(device, non_blocking=True)
        module.log(call.name, value, **options)


def average_calls(
    recorded: Sequence[Sequence[LogCall]],
    numbers: Tensor,
    weights: Tensor,
    *,
    metric_path: Callable[[object], str],
    counted: bool = False,
    losses: Tensor | None = None,
) -> list[LogCall]:
    """Combine the calls of the microbatches into one call each.

    The value is the weighted mean of the values, or their sum, minimum or maximum as ``reduce_fx``
    requests. If the calls give a ``batch_size``, it is summed, because Lightning weights the
    batches of an epoch by it.

    Args:
        recorded: Calls of every microbatch, in order.
        numbers: The logged values, one microbatch after the other, (m * calls) float64; any value
            for a metric.
        weights: Weight of every microbatch, (m) float64.
        metric_path: Returns the attribute path of a Metric object on the module.
        counted: Whether the weights are token counts.
        losses: Losses of the microbatches, (m) float64, if they are means over these tokens. A call
            that logs them is weighted by tokens, regardless of its ``batch_size``. Another call
            that gives a ``batch_size``, such as a mean over samples, is weighted by that.

    Raises:
        ValueError: The microbatches logged different names, or a call requests a reduction that
            Lightning does not have.
    """
    names = [[call.name for call in calls] for calls in recorded]
    if any(logged != names[0] for logged in names):
        raise ValueError(
            f"self.log was called with different names in different microbatches: {names[0]} "
            "and others. Log the same names in all of them"
        )
    merged = []
    for index, calls in enumerate(zip(*recorded, strict=True)):
        first = calls[0]
        options = first.options
        shares = weights
        batch_sizes = [call.options.get("batch_size") for call in calls]
        if all(size is not None for size in batch_sizes):
            options = {**options, "batch_size": sum(batch_sizes)}
            shares = numbers_on(numbers.device, batch_sizes)
            if counted:
                shares = (
                    weights
                    if losses is None
                    else _shares_of(numbers[index :: len(names[0])], losses, weights, shares)
                )
        if is_metric(first.value):
            merged.append(LogCall(first.name, None, options, metric_path(first.value)))
            continue
        # Stored by name, because a function may not be picklable.
        reduction = first.reduction
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"self.log({first.name!r}, reduce_fx={reduction}) is not supported. Use one of "
                f"{', '.join(_REDUCTIONS)}, or log a torchmetrics.Metric"
            )
        value = reduce_values(numbers[index :: len(names[0])], shares, reduction)
        merged.append(LogCall(first.name, value, {**options, "reduce_fx": reduction}))
    return merged


def _shares_of(values: Tensor, losses: Tensor, tokens: Tensor, batch_sizes: Tensor) -> Tensor:
    """Return ``tokens`` if the values are the losses, else ``batch_sizes``.

    The values are not read from the device.
    """
    is_loss = (torch.isclose(values, losses) | (tokens == 0)).all()
    return torch.where(is_loss, tokens, batch_sizes)


def numbers_on(device: torch.device, values: Sequence[object]) -> Tensor:
    """Return numbers and tensors of one element as (n) float64 on ``device``.

    The call does not wait for the device. A value that is neither becomes 0.
    """
    numbers = torch.tensor(
        [float(v) if isinstance(v, Real) else 0.0 for v in values], dtype=torch.float64
    )
    numbers = numbers.to(device, non_blocking=True)
    if not any(isinstance(value, Tensor) for value in values):
        return numbers
    pairs = zip(values, numbers.split(1), strict=True)
    return torch.cat(
        [
            v.detach().to(device, torch.float64, non_blocking=True).reshape(1)
            if isinstance(v, Tensor)
            else number
            for v, number in pairs
        ]
    )


def read_numbers(*rows: Tensor) -> list[list[float]]:
    """Read rows, (n) float64 each, from the device in one transfer."""
    numbers = iter(torch.cat(rows).tolist())
    return [list(islice(numbers, row.numel())) for row in rows]


def count_of(weight: float) -> Tensor:
    """Return a number of tokens, () int64, or the sum of their weights, () floating-point."""
    return torch.tensor(int(weight) if weight.is_integer() else weight)


def is_metric(value: object) -> bool:
    """Return True if a logged value is a torchmetrics object."""
    return hasattr(value, "compute") and hasattr(value, "update")


def weigh_over_replicas(
    calls: list[LogCall], weight: Tensor, loss: Tensor | float = 0.0, *, group: Group
) -> Tensor:
    """Average logged means over the replicas, weighted by each replica's number of tokens.

    Only means that are logged with ``sync_dist=True`` are averaged. The call is collective, and
    does not read values from the device. All replicas then log the same value, which Lightning's
    own mean over replicas leaves unchanged.

    Args:
        calls: Calls of this replica, changed in place.
        weight: Number of tokens that it counted, ().
        loss: Its sum over them.
        group: The replicas.

    Returns:
        All replicas' tokens and loss, (2) float64.
    """
    chosen = [i for i, call in enumerate(calls) if call.is_replica_mean]
    own = numbers_on(weight.device, [weight, loss])
    means = numbers_on(weight.device, [calls[i].value for i in chosen])
    # Without a token a mean may be 0/0.
    row = torch.cat([own, torch.where(own[0] > 0, means, 0.0) * own[0]])
    dist.all_reduce(row, group=group.handle)
    for i, total, mean in zip(chosen, row[2:], means, strict=True):
        calls[i] = replace(calls[i], value=torch.where(row[0] > 0, total / row[0], mean).float())
    return row[:2]


def reduce_values(values: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """Combine values logged by parts of a step, (n), into one value, ().

    The result is their weighted mean, sum, minimum or maximum.
    """
    if reduction != "mean":
        return _REDUCTIONS[reduction](values)
    total = weights.sum()
    # A value without weight may be 0/0.
    return torch.where(
        total != 0, torch.where(weights != 0, values * weights, 0.0).sum() / total, values.mean()
    )
