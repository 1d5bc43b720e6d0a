"""Broadcast of a report from the last stage to the other stages.

All numbers of a report are sent as one small tensor. Tensors are sent as they are. The *form* of a
report (names, options and the places of its numbers and tensors) is sent only when it changes,
because sending an object waits for the device several times.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.engine.step_report import LogCall, ReportStream, StepReport
from lightning_ptdp.engine.step_state import Change
from lightning_ptdp.tensor_parallel import gather_full
from lightning_ptdp.world.mesh import Group

_T = TypeVar("_T")

_CAPACITY = 62  # values that fit into the fixed-size message; longer reports need a second one
_EXACT = 2**53  # integers up to here are exact in float64


@dataclass(frozen=True)
class _TensorPlace:
    """Placeholder for a tensor in a form.

    Attributes:
        on_cpu: It stays on the CPU, regardless of the ranks' devices.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


@dataclass(frozen=True)
class _Form:
    """Content of a report except numbers and tensors.

    Attributes:
        rows: Name, options and metric of each log call.
        rest: Outputs, changes and calls of loggers, packed.
        places: Placeholders of their tensors.
        numbers: Count of their numbers.
    """

    rows: list[tuple[str, dict[str, Any], str | None]]
    rest: bytes
    places: list[_TensorPlace]
    numbers: int


class ReportSharing:
    """Broadcasts reports over the ranks of a pipeline.

    The form of the last report is kept, so that it need not be sent again.

    Args:
        group: The pipeline group.
        source: Member of the group with the last stage.
        stream: Stream on which reports are computed.
    """

    def __init__(self, group: Group, *, source: int, stream: ReportStream) -> None:
        self._group = group
        self._source = group.ranks[source]
        self._stream = stream
        self._form = b""

    def share(self, report: StepReport | None) -> StepReport:
        """Return the report of the source, which all other members call with None; collective."""
        if self._group.size == 1:
            assert report is not None
            return report
        device = self._stream.device
        head = torch.zeros(_CAPACITY + 5, dtype=torch.float64)
        numbers: list[float] = []
        tensors: list[Tensor] = []
        form_changed: float = False
        if report is not None:
            form, tensors, packed = _form_of(report, device)
            numbers = [*(call.value or 0.0 for call in report.calls), *packed]
            form_changed = form != self._form
            flags = [report.counted, report.stops, form_changed]
            first = [report.loss, report.weight, *flags, *numbers[:_CAPACITY]]
            head[: len(first)] = torch.tensor(first, dtype=torch.float64)
            self._form = form
        with self._stream.entered():
            head = head.to(device, non_blocking=True)
            dist.broadcast(head, self._source, group=self._group.handle)
            if report is None:  # the source has the values, and need not read its device
                loss, weight, counted, stops, form_changed, *numbers = head.tolist()
        if form_changed:
            self._form = self._broadcast_object(self._form)
        content: _Form = pickle.loads(self._form)
        if len(content.rows) + content.numbers > _CAPACITY:
            numbers = self._broadcast_object(numbers)
        tensors = self._broadcast_tensors(tensors, content.places)
        if report is not None:
            return report
        tensors = [
            tensor.cpu() if place.on_cpu else tensor
            for tensor, place in zip(tensors, content.places, strict=True)
        ]
        calls = [
            LogCall(name, number if metric is None else None, options, metric)
            for number, (name, options, metric) in zip(numbers, content.rows, strict=False)
        ]
        extras, changes, logger_calls = unpack(content.rest, tensors, numbers[len(content.rows) :])
        return StepReport(
            loss,
            weight,
            bool(counted),
            calls,
            extras,
            changes,
            logger_calls=logger_calls,
            stops=bool(stops),
        )

    def _broadcast_object(self, value: _T) -> _T:
        object_list = [value]
        dist.broadcast_object_list(object_list, self._source, group=self._group.handle)
        return object_list[0]

    def _broadcast_tensors(
        self, tensors: Sequence[Tensor], places: Sequence[_TensorPlace]
    ) -> list[Tensor]:
        """Return the tensors of the source, each with memory of its own.

        All other ranks pass no tensors.
        """
        device = self._stream.device
        received = []
        for index, place in enumerate(places):
            tensor = (
                tensors[index].to(device, non_blocking=True)
                if tensors
                else torch.empty(place.shape, dtype=place.dtype, device=device)
            )
            if tensor.numel():
                # Sent as bytes, because no backend takes every dtype. A tensor of one element may
                # have any stride and still be contiguous.
                flat = tensor.flatten().as_strided((tensor.numel(),), (1,))
                dist.broadcast(flat.view(torch.uint8), self._source, group=self._group.handle)
            received.append(tensor)
        return received


def _form_of(report: StepReport, device: torch.device) -> tuple[bytes, list[Tensor], list[float]]:
    try:
        payload, tensors, numbers = pack((report.extras, report.changes, report.logger_calls))
    except Exception:
        changes = [change for change in report.changes if _can_be_sent(change)]
        payload, tensors, numbers = pack((report.extras, changes, report.logger_calls))
    places = [_TensorPlace(tuple(t.shape), t.dtype, t.device != device) for t in tensors]
    rows = [(call.name, call.options, call.metric) for call in report.calls]
    return pickle.dumps(_Form(rows, payload, places, len(numbers))), tensors, numbers


def _can_be_sent(change: Change) -> bool:
    try:
        pack(change)
    except Exception as error:
        warnings.warn(
            f"the step changed {change.name} to a value that cannot be sent to the other "
            f"pipeline stages ({error}). Use numbers, tensors and containers of them",
            stacklevel=2,
        )
        return False
    return True


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []

    def persistent_id(self, value: object) -> str | None:
        if type(value) is float or (type(value) is int and abs(value) <= _EXACT):
            self.numbers.append(value)
            # a string: a number would be asked for an id too
            return f"{type(value).__name__} {len(self.numbers) - 1}"
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        self.tensors.append(gather_full(value.detach()).contiguous())
        return f"tensor {len(self.tensors) - 1}"


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[Tensor], numbers: Sequence[float]
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._numbers = numbers

    def persistent_load(self, place: str) -> Tensor | float:
        kind, index = place.split()
        if kind == "tensor":
            return self._tensors[int(index)]
        number = self._numbers[int(index)]
        return number if kind == "float" else int(number)


def pack(value: object) -> tuple[bytes, list[Tensor], list[float]]:
    """Return the form of ``value``, its tensors and its numbers.

    The call is collective over the tensor group if tensors are split over the vocabulary.

    Raises:
        Exception: Any exception of pickle for a value that cannot be sent.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors, packer.numbers


def unpack(form: bytes, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Any:
    """Return the object that was packed."""
    return _Unpacker(io.BytesIO(form), tensors, numbers).load()
