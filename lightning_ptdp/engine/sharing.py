"""A report on its way from the last stage to the others.

Numbers travel as one small tensor, tensors as another; names, options and forms are only sent again when they change.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.engine.parcel import TensorPlace, empty_message, pack, tensors_of, to_bytes, unpack
from lightning_ptdp.engine.report import LogCall, StepReport
from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.world.mesh import Group

__all__ = ["ReportMemory", "share_report"]

_CAPACITY = 62  # values that fit into the fixed-size message; longer reports take a second one


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
