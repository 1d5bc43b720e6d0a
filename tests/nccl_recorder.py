"""What a rank of a real training gives to torch.distributed, and waits for, in order: to be run on NCCL's rules (schedule/streams.py)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.data_parallel import beside
from tests.schedule.streams import Operation

__all__ = ["Call", "operations_of", "recording"]

_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_READS = ("tolist", "item", "__float__", "__int__", "__bool__", "numpy")


@dataclass(frozen=True)
class Call:
    """Attributes:
    what: A function of torch.distributed, "wait", or "read": the host reads a tensor; "side": the stream beside the computation
        waits for it, "join": it waits for that.
    group: Its group's name and global ranks.
    parts: What it moves: elements and dtype of a collective's tensors; (source, destination, elements) of messages.
    waits: Of "wait", the place of what is waited for in the rank's calls.
    is_async: It is waited for by a "wait", if at all.
    stream: In which it is issued, and waited for.
    """

    what: str
    group: tuple[str, tuple[int, ...]] = ("", ())
    parts: tuple[Any, ...] = ()
    waits: int = -1
    is_async: bool = False
    stream: str = "compute"


@dataclass
class _Handle:
    """A handle whose waits are noted."""

    work: Any
    recorder: _Recorder
    place: int

    def wait(self, *args: Any) -> Any:
        self.recorder.note(Call("wait", waits=self.place))
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@dataclass
class _Recorder:
    calls: list[Call] = field(default_factory=list)
    inside: int = 0
    stream: str = "compute"

    def note(self, call: Call) -> int:
        self.calls.append(replace(call, stream=self.stream))
        return len(self.calls) - 1

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, group=group, **kwargs)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            parts = tuple((tensor.numel(), str(tensor.dtype)) for tensor in tensors)
            place = self.note(Call(name, _named(group), parts, is_async=bool(kwargs.get("async_op"))))
            work = self._inner(function, *args, group=group, **kwargs)
            return _Handle(work, self, place) if kwargs.get("async_op") else work

        return call

    def message(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, peer: int, group: Any = None, **kwargs: Any) -> Any:
            own = dist.get_rank()
            line = (own, peer) if "send" in name else (peer, own)
            place = self.note(Call(name, _named(group), ((*line, tensor.numel()),), is_async=name.startswith("i")))
            work = self._inner(function, tensor, peer, group=group, **kwargs)
            return _Handle(work, self, place) if name.startswith("i") else work

        return call

    def batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(operations: Sequence[Any]) -> Any:
            own = dist.get_rank()
            parts = tuple(((own, op.peer) if op.op is _SEND else (op.peer, own)) + (op.tensor.numel(),) for op in operations)
            place = self.note(Call("batch", _named(operations[0].group), parts, is_async=True))
            return [_Handle(work, self, place) for work in self._inner(function, operations)]

        return call

    def read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any) -> Any:
            if not self.inside:
                self.note(Call("read"))
            return function(tensor, *args)

        return call

    def _inner(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.inside -= 1


@dataclass
class _Side:
    """In the place of the stream on which reductions go on."""

    recorder: _Recorder
    has_host: bool = False

    def run(self, task: Callable[[], None]) -> None:
        self.recorder.note(Call("side"))
        self.recorder.stream = "side"
        task()
        self.recorder.stream = "compute"

    def join(self) -> None:
        self.recorder.note(Call("join"))

    def close(self) -> None:
        pass


_SEND, _RECEIVE = dist.isend, dist.irecv


def _named(group: Any) -> tuple[str, tuple[int, ...]]:
    group = dist.group.WORLD if group is None else group
    return group.group_name, tuple(dist.get_process_group_ranks(group))


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """All calls of this process, as they come."""
    recorder, point = _Recorder(), dist.P2POp
    originals: dict[str, Callable[..., Any]] = {"isend": _SEND, "irecv": _RECEIVE}

    def operation(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return point(originals.get(getattr(function, "__name__", ""), function), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, recorder.collective(name, getattr(dist, name))))
        for name in ("send", "recv", "isend", "irecv"):
            noted = recorder.message(name, getattr(dist, name))
            noted.__name__ = name
            stack.enter_context(mock.patch.object(dist, name, noted))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", recorder.batch(dist.batch_isend_irecv)))
        stack.enter_context(mock.patch.object(dist, "P2POp", operation))
        stack.enter_context(mock.patch.object(beside, "line_on", return_value=_Side(recorder)))
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, recorder.read(getattr(Tensor, name))))
        yield recorder.calls


def operations_of(calls: Sequence[Call]) -> list[Operation]:
    """What a GPU would be given: a communicator is a stream, what is not asynchronous is waited for by whatever is computed next, and what
    is read holds the host."""
    given: list[Operation] = []
    counts: Counter[Hashable] = Counter()
    ends: dict[int, list[int]] = {}
    latest = {"compute": -1, "side": -1}

    def give(
        name: str, stream: Hashable, waits: Sequence[int], meets: Hashable = None, parts: int = 1, holds: bool = False
    ) -> int:
        waits = tuple(place for place in waits if place >= 0)
        given.append(Operation(name=name, stream=stream, waits=waits, meets=meets, parts=parts, holds=holds))
        return len(given) - 1

    before: dict[Hashable, list[int]] = {}
    for place, call in enumerate(calls):
        stream = call.stream
        if call.what in ("side", "join"):
            stream = "side" if call.what == "side" else "compute"
            latest[stream] = give(call.what, stream, tuple(latest.values()))
        elif call.what == "read":
            latest[stream] = give("read", stream, (latest[stream],), holds=True)
        elif call.what == "wait":
            latest[stream] = give("wait", stream, (latest[stream], *ends[call.waits]))
        else:
            messages = call.what in ("send", "recv", "isend", "irecv", "batch")
            meetings = [(call.group, part[:2]) for part in call.parts] if messages else [(call.group, "all")]
            # What is issued as a batch starts together: as streams of their own behind all that the communicator had.
            held, now = before.get(call.group, []), []
            for index, meeting in enumerate(meetings):
                counts[meeting] += 1
                detail = call.parts[index][2] if messages else (call.what, call.parts)
                meets = (meeting, counts[meeting], detail)
                size = 2 if messages else len(call.group[1])
                now.append(give(f"{call.what} {call.group[1]}", (call.group, index), (latest[stream], *held), meets, size))
            before[call.group] = ends[place] = now
            if not call.is_async:
                latest[stream] = give(f"after {call.what}", stream, (latest[stream], *now))
    return given
