"""Operations that a process has issued on "queued" communicators (queued.py).

Computation waits for them as on NCCL.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.data_parallel import overlapped_reduction
from tests.nccl_calls import Call

__all__ = ["HOST", "Host", "RaceError", "Run", "Transfer", "habits"]

_UNTOUCHED = ("empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "set_")
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
Run = Callable[[dist.ProcessGroupGloo], None]


class RaceError(AssertionError):
    """Error for the use of an operation's tensors without a wait."""


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of memory, and whether they are written."""

    start: int
    end: int
    is_written: bool

    @classmethod
    def of(cls, tensor: Tensor, is_written: bool) -> Span:
        """Return the span from the first to the last element."""
        start, last = (
            tensor.data_ptr(),
            sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)),
        )
        return cls(
            start, start + (last + 1) * tensor.element_size() * (tensor.numel() > 0), is_written
        )

    def disturbs(self, other: Span) -> bool:
        """Return True if both spans overlap and at least one is written."""
        return (
            (self.is_written or other.is_written)
            and self.start < other.end
            and other.start < self.end
        )


class Transfer(dist.Work):
    """One issued operation of a communicator.

    Args:
        call: Record of the call.
        run: Function that runs the operation on the communicator's thread.
        reads: Input tensors.
        writes: Output tensors.
    """

    def __init__(
        self, call: Call, run: Run, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.name, self.group, self.run = f"{call.what} of {call.group[1]}", call.group, run
        self.after, self.holds, self.place = (
            tuple(HOST.waited[HOST.stream]),
            call.what == "barrier",
            HOST.note(call),
        )
        self.tensors = (*reads, *writes)
        self.spans = [
            *(Span.of(tensor, False) for tensor in reads),
            *(Span.of(tensor, True) for tensor in writes),
        ]
        self.error: Exception | None = None
        self.ordered: set[str] = set()
        """Streams that wait for the operation."""
        self._ended, self._future = threading.Event(), torch.futures.Future[list[Tensor]]()

    def disturbs(self, span: Span) -> bool:
        """Return True if a use of ``span`` must not overlap in time with this operation."""
        return any(mine.disturbs(span) for mine in self.spans)

    def end(self) -> None:
        """Mark the operation as completed or failed, on the communicator's thread."""
        self._ended.set()
        self._future.set_result(list(self.tensors))

    def join(self) -> None:
        """Block the host until the operation has completed."""
        self._ended.wait()
        if self.error is not None:
            raise self.error

    # ---- interface for torch ---------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        HOST.wait(self)
        return True

    def is_completed(self) -> bool:
        if has_ended := self._ended.is_set():
            self.ordered = {"compute", "side"}  # known to the host, so no stream needs to wait
        return has_ended

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


@dataclass
class Host:
    """Record of the operations of this process.

    Attributes:
        open: Operations that have not completed or that have no wait.
        stream: Current stream of the host: "compute" or "side".
        waited: By stream, the operations that later operations of the stream must follow.
        met: (kind, ranks of the group, ranks of the connection) of every opened connection.
        calls: All issued operations, waits and reads.
    """

    open: list[Transfer] = field(default_factory=list)
    stream: str = "compute"
    waited: dict[str, list[Transfer]] = field(default_factory=lambda: {"compute": [], "side": []})
    met: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def note(self, call: Call) -> int:
        """Record ``call`` and return its index in ``calls``."""
        self.calls.append(replace(call, stream=self.stream))
        return len(self.calls) - 1

    def issue(self, transfer: Transfer) -> None:
        """Record an operation and fill its outputs with NaN."""
        self._forget()
        others = [other for other in self.open if any(map(other.disturbs, transfer.spans))]
        for other in others:
            if other.group != transfer.group and self.stream not in other.ordered:
                raise RaceError(
                    f"{transfer.name} is issued with tensors of {other.name}, which nobody has "
                    "waited for"
                )
        sent = [span for span in transfer.spans if not span.is_written]
        for tensor, span in zip(transfer.tensors, transfer.spans, strict=True):
            if span.is_written and not others and not any(span.disturbs(part) for part in sent):
                _poison(tensor)
        self.open.append(transfer)

    def wait(self, transfer: Transfer) -> None:
        """Make the current stream wait for an operation."""
        if self.stream not in transfer.ordered:
            self.note(Call("wait", waits=transfer.place))
            self.waited[self.stream].append(transfer)
        transfer.ordered.add(self.stream)
        if transfer.holds:
            transfer.join()
        self._forget()

    def touch(self, tensor: Tensor, is_written: bool, what: str) -> None:
        """Block the host until a tensor that it uses is available."""
        if not self.open or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        span = Span.of(tensor, is_written)
        for transfer in [transfer for transfer in self.open if transfer.disturbs(span)]:
            if self.stream not in transfer.ordered:
                raise RaceError(
                    f"{what} uses tensors of {transfer.name}, which nobody has waited for"
                )
            transfer.join()
        self._forget()

    def drain(self) -> None:
        """Block the host until all operations that computation waits for have completed.

        A GPU would complete them without its host.
        """
        for transfer in self.waited["compute"]:
            transfer.join()

    def follow(self, what: str, stream: str, other: str) -> None:
        """Make ``stream`` wait for all open operations that ``other`` waits for."""
        self.note(Call(what))
        for transfer in self.open:
            if other in transfer.ordered and stream not in transfer.ordered:
                transfer.ordered.add(stream)
                self.waited[stream].append(transfer)

    def _forget(self) -> None:
        for stream, waited in self.waited.items():
            self.waited[stream] = [transfer for transfer in waited if not transfer._ended.is_set()]
        self.open = [
            transfer
            for transfer in self.open
            if not ("compute" in transfer.ordered and transfer._ended.is_set())
        ]


HOST = Host()


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.detach().fill_(77)


class _Computation(TorchDispatchMode):
    """Dispatch mode that makes every torch operation wait for its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        if name in _READS:
            HOST.note(Call("read"))
        if HOST.open and not func.is_view and name not in _UNTOUCHED:
            for place, argument in enumerate(func._schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        HOST.touch(tensor, is_written, str(func))
        return func(*args, **kwargs)


class _Side:
    """Replacement of the side stream for gradient reductions."""

    has_host = False

    def run(self, task: Callable[[], None]) -> None:
        HOST.follow("side", "side", "compute")
        HOST.stream = "side"
        try:
            task()
        finally:
            HOST.stream = "compute"

    def keep(self, done: Iterable[object]) -> None:
        pass

    def join(self) -> None:
        HOST.follow("join", "compute", "side")

    def close(self) -> None:
        pass


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        HOST.note(Call("read"))
        HOST.touch(tensor, False, function.__name__)
        return function(tensor, *args, **kwargs)

    return read


@contextlib.contextmanager
def habits() -> Iterator[Host]:
    """Make computation wait for awaited operations within this context.

    Groups outlive the context, but computation after it is not checked.
    """
    HOST.__init__()
    with contextlib.ExitStack() as stack:
        for name in ("numpy", "tolist"):  # they read memory without torch's dispatcher
            stack.enter_context(mock.patch.object(Tensor, name, _reading(getattr(Tensor, name))))
        stack.enter_context(
            mock.patch.object(overlapped_reduction, "line_on", return_value=_Side())
        )
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", _issue_as_one))
        stack.enter_context(_Computation())
        yield HOST


def _issue_as_one(operations: Sequence[dist.P2POp]) -> list[Any]:
    """Issue messages as one batch, like ``dist.batch_isend_irecv`` on NCCL.

    Needed until torch 2.14: earlier versions do not coalesce for backends written in Python.
    """
    group: Any = operations[0].group
    group._start_coalescing(operations[0].tensor.device)
    for operation in operations:
        operation.op(operation.tensor, operation.peer, operation.group)
    return [group._end_coalescing(operations[0].tensor.device)]
