"""Sends and receives between neighbouring stages: just-in-time buffers, one communicator a direction.

What crosses is not agreed in advance. Its shapes depend on the microbatch alone, and every rank of a replica reads the same
microbatches; so the first time that a microbatch of a new signature (shapes and dtypes of its tensors) crosses a boundary, a header
goes ahead, and afterwards both sides know without asking::

    header      int64, the length of ...
    form        ... this many bytes of JSON: shapes, dtypes, structure (crossing.py)
    tensors     one message each

Under tensor parallelism without sequence parallelism the t ranks of a stage hold the same hidden state. With ``scatter`` each sends
1/t of it to its neighbour, and the receivers gather it over their own, faster links (arXiv 2104.04473, section 4.1).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp._torch import all_gather_single
from lightning_ptdp.pipeline.crossing import Crossing, Form, TensorForm
from lightning_ptdp.schedule.actions import ActionKind, Channel, Direction, Schedule
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["PeerError", "Receipt", "Transport", "receives_ahead"]

_MIN_OUTSTANDING = 4


class PeerError(RuntimeError):
    """A neighbour did not answer within the limit or went away; the message names the rank and the action."""


@dataclass(eq=False)
class Receipt:
    """A receive that was asked for. ``wait`` returns what arrived.

    Attributes:
        what: The action that it is for.
        key: Under which the form is known, for a hidden state.
        form: What comes, once known; until then a header is awaited.
        buffers: Posted, one a tensor (or the header's).
        works: Handles of what was posted; None while an earlier header of the channel is awaited, since messages arrive in order.
    """

    transport: Transport
    what: str
    source: int
    direction: Direction
    key: tuple[str, Hashable] | None = None
    form: Form | None = None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[Any] | None = None

    def post(self) -> bool:
        """Post the receives of the tensors if their form is known, else of the header; whether it was the former."""
        transport = self.transport
        if self.form is None:
            self.form = transport.known.get(self.key)
        if self.form is None:
            self._post([torch.empty(1, dtype=torch.int64, device=transport.device)])
            return False
        self._post([transport.buffer(form) for form in self.form.tensors])
        transport.count_receives(self.buffers)
        return True

    def learn(self) -> None:
        """Wait for the header and the form, and post the receives of the tensors behind it."""
        assert self.form is None and self.key is not None
        (length,) = self._arrived()
        self._post([torch.empty(int(length.item()), dtype=torch.uint8, device=self.transport.device)])
        (encoded,) = self._arrived()
        self.transport.known[self.key] = Form.decode(bytes(encoded.tolist()))
        self.post()

    def wait(self) -> Crossing:
        """The tensors, with their form if they are activations."""
        while self.form is None or self.works is None:
            self.transport.advance(self.source)
        buffers = self._arrived()
        self.transport.count_receives(buffers, -1)
        pairs = zip(buffers, self.form.tensors, strict=True)
        tensors = tuple(self.transport.assemble(buffer, form) for buffer, form in pairs)
        return Crossing(tensors, self.form if self.key is not None else Form())

    def _post(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.works = [self.transport.irecv(buffer, self.source, self.direction) for buffer in buffers if buffer.numel()]

    def _arrived(self) -> list[Tensor]:
        assert self.works is not None
        for work in self.works:
            self.transport.wait(work, self.what, self.source)
        buffers, self.buffers = self.buffers, []
        return buffers


@dataclass(frozen=True)
class _Sent:
    """One crossing on its way, and the tensors that must live until it has left."""

    works: list[Any]
    tensors: list[Tensor]
    what: str
    target: int
    crossing: int
    """How many of ``tensors`` are of the crossing, not of its header."""


@dataclass
class Transport:
    """Point-to-point messages of one pipeline rank.

    Attributes:
        mesh: Supplies the communicators.
        device: Where received tensors are made.
        scatter: Send 1/t of each floating-point tensor, which all t tensor-parallel ranks must hold alike.
        scatter_minimum: Elements a rank below which a tensor is sent whole.
        waiting: Told (action, global rank) before a wait and (action, None) after it.
        explain: What is known about the other ranks, for the error of a wait that failed.
        known: Forms by (boundary, signature), learnt from headers.
        sent_bytes: Sum over all messages.
        peak_receives: The most receive buffers that were posted at once.
        peak_receive_bytes: Their size, at most.
        peak_outstanding_sends: The most sent tensors that were kept at once.
    """

    mesh: ProcessMesh
    device: torch.device
    scatter: bool = False
    scatter_minimum: int = 1024
    waiting: Callable[[str, int | None], None] | None = None
    explain: Callable[[], str] | None = None
    known: dict[tuple[str, Hashable] | None, Form] = field(default_factory=dict)
    sent_bytes: int = 0
    peak_receives: int = 0
    peak_receive_bytes: int = 0
    peak_outstanding_sends: int = 0
    _receives: int = 0
    _receive_bytes: int = 0
    _limit: int = _MIN_OUTSTANDING
    _schedule: Schedule | None = None
    _announced: dict[tuple[str, Hashable], Form] = field(default_factory=dict)
    _outstanding: dict[Channel, deque[_Sent]] = field(default_factory=dict)
    _queues: dict[int, deque[Receipt]] = field(default_factory=dict)

    def begin(self, schedule: Schedule) -> None:
        """A program of ``schedule`` starts.

        gloo does not tell when a message has left, so there the oldest of a channel is waited for. That cannot deadlock,
        as long as a channel may have as many messages under way as its receiver asks for ahead of their use.
        """
        if schedule is not self._schedule and self.device.type == "cpu":
            self._schedule, self._limit = schedule, max(_MIN_OUTSTANDING, receives_ahead(schedule))

    # ---- hidden states ------------------------------------------------------------------------------------------------

    def send_forward(self, what: str, crossing: Crossing, *, target: int, signature: Hashable) -> None:
        """Send what crosses to global rank ``target``; returns at once.

        Args:
            what: The action that takes it, ``F{stage}.{microbatch}``.
            crossing: From the stage before.
            target: Global rank.
            signature: Decides the form of the crossing.

        Raises:
            ValueError: Another form was sent for the signature before.
        """
        key, header = (what.partition(".")[0], signature), []
        if key not in self._announced:
            self._announced[key] = crossing.form
            encoded = torch.frombuffer(bytearray(crossing.form.encode()), dtype=torch.uint8).to(self.device)
            header = [torch.tensor([encoded.numel()], dtype=torch.int64, device=self.device), encoded]
        elif self._announced[key] != crossing.form:
            raise ValueError(_changed(what, self._announced[key], crossing.form))
        self._send(what, crossing, target, "forward", header)

    def receive_forward(self, what: str, *, source: int, signature: Hashable) -> Receipt:
        """Post the receive of what crosses from global rank ``source``."""
        receipt = Receipt(self, what, source, "forward", key=(what.partition(".")[0], signature))
        queue = self._queues.setdefault(source, deque())
        # Behind a header whose hidden state has not been asked for, nothing else may be: messages of a channel arrive in order.
        if queue or not receipt.post():
            queue.append(receipt)
        return receipt

    def advance(self, source: int) -> None:
        """Wait for the oldest header of the channel from ``source``, then post what was asked for behind it."""
        queue = self._queues[source]
        queue.popleft().learn()
        while queue and queue[0].post():
            queue.popleft()

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def send_backward(self, what: str, gradients: Crossing, *, target: int) -> None:
        """Send the gradients of what was received to the rank that sent it; returns at once."""
        self._send(what, gradients, target, "backward", [])

    def receive_backward(self, what: str, *, source: int, awaited: tuple[TensorForm, ...]) -> Receipt:
        """Post the receive of the gradients that a crossing awaits."""
        receipt = Receipt(self, what, source, "backward", form=Form(tensors=awaited))
        receipt.post()
        return receipt

    # ---- one tensor ---------------------------------------------------------------------------------------------------

    def sent_numel(self, form: TensorForm) -> int:
        """Elements of a tensor that one rank sends."""
        if not self.scatter:
            return math.prod(form.shape)
        numel, size = math.prod(form.shape), self.mesh.group("tensor").size
        divides = form.dtype.is_floating_point and numel % size == 0 and numel >= size * self.scatter_minimum
        return numel // size if divides else numel

    def buffer(self, form: TensorForm) -> Tensor:
        """Where a tensor, or with ``scatter`` this rank's part of it (flat), can be received."""
        return torch.empty(self.sent_numel(form) if self.scatter else form.shape, dtype=form.dtype, device=self.device)

    def assemble(self, buffer: Tensor, form: TensorForm) -> Tensor:
        """The whole tensor from what one rank received of it; collective over the tensor-parallel group if it was scattered."""
        if not self.scatter:
            return buffer
        numel = math.prod(form.shape)
        if buffer.numel() < numel:
            whole = torch.empty(numel, dtype=form.dtype, device=self.device)
            all_gather_single(_as_bytes(whole), _as_bytes(buffer), self.mesh.group("tensor").handle)
            buffer = whole
        return buffer.view(form.shape)

    def _own_part(self, tensor: Tensor) -> Tensor:
        """What this rank sends of ``tensor``: contiguous, without a copy if that is possible, and flat if it is a part."""
        if not self.scatter:
            return tensor.detach().contiguous()
        size, flat = self.sent_numel(TensorForm.of(tensor)), tensor.detach().reshape(-1)
        return flat if size == flat.numel() else flat.narrow(0, self.mesh.group("tensor").rank * size, size)

    # ---- messages -----------------------------------------------------------------------------------------------------

    def irecv(self, buffer: Tensor, source: int, direction: Direction) -> Any:
        """Post a receive on the channel (source, this rank, direction); any dtype."""
        return dist.irecv(_as_bytes(buffer), source, group=self.mesh.channels[source, self.mesh.rank, direction])

    def count_receives(self, buffers: Sequence[Tensor], sign: int = 1) -> None:
        """Keep the peaks, as buffers are posted (1) and taken (-1)."""
        self._receives += sign * len(buffers)
        self._receive_bytes += sign * sum(buffer.nbytes for buffer in buffers)
        self.peak_receives = max(self.peak_receives, self._receives)
        self.peak_receive_bytes = max(self.peak_receive_bytes, self._receive_bytes)

    def wait(self, work: Any, what: str, peer: int) -> None:
        """Wait for a posted message.

        Raises:
            PeerError: It did not come within the process group's time limit, or the peer is gone.
        """
        if self.waiting is not None:
            self.waiting(what, peer)
        try:
            work.wait()
        except RuntimeError as error:
            known = f"\n{self.explain()}" if self.explain is not None else ""
            raise PeerError(
                f"rank {self.mesh.rank} ({self.mesh.where}) waited in action {what} for rank {peer}, which did not answer: "
                f"{error}{known}"
            ) from error
        if self.waiting is not None:
            self.waiting(what, None)

    def flush(self) -> None:
        """Wait until every message of the step has left, and drop the tensors that were kept for them."""
        for sent in self._outstanding.values():
            while sent:
                self._wait_sent(sent.popleft())

    def _send(self, what: str, crossing: Crossing, target: int, direction: Direction, header: list[Tensor]) -> None:
        channel = Channel(self.mesh.rank, target, direction)
        queue = self._outstanding.setdefault(channel, deque())
        parts = [self._own_part(tensor) for tensor in crossing.tensors]
        tensors = [*header, *(part for part in parts if part.numel())]
        group = self.mesh.channels[channel]
        works = [dist.isend(_as_bytes(tensor), target, group=group) for tensor in tensors]
        # Only now that the message is on its way: the neighbour waits for it.
        self._drop_sent(queue)
        queue.append(_Sent(works, tensors, what, target, len(parts)))
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        kept = sum(sent.crossing for others in self._outstanding.values() for sent in others)
        self.peak_outstanding_sends = max(self.peak_outstanding_sends, kept)

    def _drop_sent(self, sent: deque[_Sent]) -> None:
        """A sent tensor must live until its message has left, and no longer: drop the finished ones on every send."""
        while sent and (all(work.is_completed() for work in sent[0].works)):
            sent.popleft()
        while self.device.type == "cpu" and len(sent) >= self._limit:
            self._wait_sent(sent.popleft())

    def _wait_sent(self, sent: _Sent) -> None:
        for work in sent.works:
            self.wait(work, sent.what, sent.target)


def receives_ahead(schedule: Schedule) -> int:
    """The most messages of one channel that a rank of ``schedule`` has asked for and not yet taken; at least 1."""
    receives = {ActionKind.RECEIVE_FORWARD: ActionKind.FORWARD, ActionKind.RECEIVE_BACKWARD: ActionKind.BACKWARD}
    most = 1
    for program in schedule.programs:
        asked: dict[tuple[ActionKind, int, int | None], Channel] = {}
        counts: Counter[Channel] = Counter()
        for action in program:
            key = (receives.get(action.kind, action.kind), action.stage, action.microbatch)
            if action.kind in receives:
                asked[key] = schedule.channel(action)
                counts[asked[key]] += 1
                most = max(most, counts[asked[key]])
            elif key in asked:
                counts[asked.pop(key)] -= 1
    return most


_NATIVE = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8})
"""What every backend sends as it is, without a view to be made of it first."""


def _as_bytes(tensor: Tensor) -> Tensor:
    """To send or receive any dtype: the same memory as bytes, where the backend might not know the dtype."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def _changed(what: str, before: Form, now: Form) -> str:
    detail = f"have shape {now}, but a microbatch of the same input shapes gave {before} before"
    if str(before) == str(now):
        detail = "have another structure than those of a microbatch of the same input shapes before"
    return (
        f"{what}: the tensors that cross {detail}; under a pipeline what passes between blocks may depend on the shapes in the batch, "
        "not on its values"
    )
