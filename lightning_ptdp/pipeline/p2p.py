"""Point-to-point transport between neighbouring stages.

Receive buffers are allocated just in time, and each direction has its own communicator.

The form of a crossing is not agreed in advance. Its shapes depend on the microbatch alone, and
every rank of a replica reads the same microbatches. The first time that a microbatch of a new
signature (shapes and dtypes of its tensors) crosses a boundary, a header precedes it. Afterwards
both sides know the form without a header::

    header      int64, the length of ...
    form        ... this many pickled bytes: shapes, dtypes, structure (crossing.py)
    tensors     one message each

Under tensor parallelism without sequence parallelism, the t ranks of a stage hold the same hidden
state. With ``scatter`` each rank sends 1/t of it to its neighbour, and the receivers gather it over
their own, faster links (arXiv 2104.04473, section 4.1). Only the first tensor that a block returns
counts as the hidden state: an attention bias returned with it may belong to a rank's own heads.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.pipeline.crossing import Crossing, Form, TensorForm
from lightning_ptdp.pipeline.program_observers import StepObserver
from lightning_ptdp.pipeline.rank_status import cause_first
from lightning_ptdp.schedule.actions import Channel, Direction, Schedule, receives_ahead
from lightning_ptdp.shims.torch_distributed import all_gather_single
from lightning_ptdp.world.mesh import ProcessMesh

_MIN_OUTSTANDING = 4


class PeerError(PTDPError, RuntimeError):
    """A neighbour did not answer within the limit or is gone.

    The message names the rank and the action.
    """


@dataclass(eq=False)
class Receipt:
    """A requested receive; ``wait`` returns the received crossing.

    Attributes:
        what: The action that needs it.
        key: Key under which the form is known, for a hidden state.
        form: Form of the crossing, once known; until then a header is awaited.
        buffers: Posted buffers, one per tensor (or that of the header).
        works: Handles of the posted receives; None while an earlier header of the channel is
            awaited, because messages arrive in order.
    """

    transport: Transport
    what: str
    source: int
    direction: Direction
    key: tuple[str, Hashable] | None = None
    form: Form | None = None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[dist.Work | None] | None = None

    def post(self) -> bool:
        """Post the receives of the tensors if their form is known, else that of the header.

        Returns:
            True if the form is known.
        """
        transport = self.transport
        if self.form is None:
            self.form = transport.known.get(self.key)
        if self.form is None:
            self._post([torch.empty(1, dtype=torch.int64, device=transport.device)])
            return False
        self._post([transport.buffer(form) for form in self.form.tensors])
        return True

    def learn(self) -> None:
        """Wait for the header and the form, then post the receives of the tensors."""
        assert self.form is None and self.key is not None
        (length,) = self._arrived()
        self._post(
            [torch.empty(int(length.item()), dtype=torch.uint8, device=self.transport.device)]
        )
        (encoded,) = self._arrived()
        self.transport.known[self.key] = pickle.loads(bytes(encoded.tolist()))
        self.post()

    def wait(self) -> Crossing:
        """Return the tensors, with their form if they are activations."""
        while self.form is None or self.works is None:
            self.transport.advance(self.source)
        buffers = self._arrived()
        pairs = zip(buffers, self.form.tensors, strict=True)
        tensors = tuple(self.transport.assemble(buffer, form) for buffer, form in pairs)
        return Crossing(tensors, self.form)

    def _post(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.works = [
            self.transport.irecv(buffer, self.source, self.direction)
            for buffer in buffers
            if buffer.numel()
        ]

    def _arrived(self) -> list[Tensor]:
        assert self.works is not None
        for work in self.works:
            self.transport.wait(work, self.what, self.source)
        buffers = self.buffers
        self.buffers = []
        return buffers


@dataclass(frozen=True)
class _Sent:
    """One crossing being sent, and the tensors that must live until it has left."""

    works: list[dist.Work | None]
    tensors: list[Tensor]
    what: str
    target: int


@dataclass
class Transport:
    """Point-to-point messages of one pipeline rank.

    Attributes:
        mesh: Supplies the communicators.
        device: Device of received tensors.
        scatter: Send 1/t of each floating-point tensor that is equal on all t tensor-parallel
            ranks.
        scatter_minimum: Elements per rank below which a tensor is not scattered.
        waiting: Called with (action, global rank) before a wait and (action, None) after it.
        explain: Returns the known state of the other ranks, for the error of a failed wait.
        known: Forms by (boundary, signature), sent in headers or received in them.
    """

    mesh: ProcessMesh
    device: torch.device
    scatter: bool = False
    scatter_minimum: int = 1024
    waiting: Callable[[str, int | None], None] = StepObserver().waiting
    explain: Callable[[], str] = str
    known: dict[tuple[str, Hashable] | None, Form] = field(default_factory=dict)
    _limit: int = _MIN_OUTSTANDING
    _schedule: Schedule | None = None
    _outstanding: dict[Channel, deque[_Sent]] = field(default_factory=dict)
    _queues: dict[int, deque[Receipt]] = field(default_factory=dict)

    def begin(self, schedule: Schedule) -> None:
        """Prepare for a program of ``schedule``.

        gloo does not report when a message has left. With gloo, the sender therefore waits for the
        oldest message of a channel. This cannot deadlock if a channel may have as many unfinished
        messages as its receiver requests ahead of their use.
        """
        if schedule is not self._schedule and self.device.type == "cpu":
            self._schedule = schedule
            self._limit = max(_MIN_OUTSTANDING, receives_ahead(schedule))

    # ---- hidden states ---------------------------------------------------------------------------

    def send_forward(
        self, what: str, crossing: Crossing, *, target: int, signature: Hashable
    ) -> None:
        """Send a crossing to global rank ``target``; return at once.

        Args:
            what: The action that takes it, ``F{stage}.{microbatch}``.
            crossing: Crossing of the stage before.
            target: Global rank.
            signature: Determines the form of the crossing.

        Raises:
            ValueError: Another form was sent for the same signature before.
        """
        key = (what.partition(".")[0], signature)
        header = []
        if key not in self.known:
            self.known[key] = crossing.form
            form = bytearray(pickle.dumps(crossing.form))
            encoded = torch.frombuffer(form, dtype=torch.uint8).to(self.device)
            header = [
                torch.tensor([encoded.numel()], dtype=torch.int64, device=self.device),
                encoded,
            ]
        elif self.known[key] != crossing.form:
            raise ValueError(_changed(what, self.known[key], crossing.form))
        self._send(what, crossing, target, "forward", header)

    def receive_forward(self, what: str, *, source: int, signature: Hashable) -> Receipt:
        """Post the receive of a crossing from global rank ``source``."""
        receipt = Receipt(self, what, source, "forward", key=(what.partition(".")[0], signature))
        queue = self._queues.setdefault(source, deque())
        # Messages of a channel arrive in order. A receive must not be posted after a header whose
        # tensors have not been requested yet.
        if queue or not receipt.post():
            queue.append(receipt)
        return receipt

    def advance(self, source: int) -> None:
        """Wait for the oldest header from ``source``, then post the receives queued after it."""
        queue = self._queues[source]
        queue.popleft().learn()
        while queue and queue[0].post():
            queue.popleft()

    # ---- gradients -------------------------------------------------------------------------------

    def send_backward(self, what: str, gradients: Crossing, *, target: int) -> None:
        """Send the gradients of a received crossing to its sender; return at once."""
        self._send(what, gradients, target, "backward", [])

    def receive_backward(
        self, what: str, *, source: int, awaited: tuple[TensorForm, ...]
    ) -> Receipt:
        """Post the receive of the gradients that a crossing awaits."""
        receipt = Receipt(self, what, source, "backward", form=Form(tensors=awaited))
        receipt.post()
        return receipt

    # ---- one tensor ------------------------------------------------------------------------------

    def shares(self, form: TensorForm) -> int:
        """Return the number of ranks that send a tensor together, each an equal part of it."""
        if not self.scatter or not form.replicated or not form.dtype.is_floating_point:
            return 1
        numel = math.prod(form.shape)
        size = self.mesh.group("tensor").size
        return size if numel % size == 0 and numel >= size * self.scatter_minimum else 1

    def buffer(self, form: TensorForm) -> Tensor:
        """Return a buffer for receiving a tensor, or for this rank's part of it (flat)."""
        shares = self.shares(form)
        shape = form.shape if shares == 1 else (math.prod(form.shape) // shares,)
        return torch.empty(shape, dtype=form.dtype, device=self.device)

    def assemble(self, buffer: Tensor, form: TensorForm) -> Tensor:
        """Return the full tensor, given the part that this rank received.

        The call is collective over the tensor-parallel group if the tensor was scattered.
        """
        if self.shares(form) == 1:
            return buffer
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        all_gather_single(
            _as_bytes(tensor.view(-1)), _as_bytes(buffer), self.mesh.group("tensor").handle
        )
        return tensor

    def _own_part(self, tensor: Tensor, form: TensorForm) -> Tensor:
        """Return the part of ``tensor`` that this rank sends.

        The part is contiguous, without a copy if possible. It is flat if it is not the full
        tensor.
        """
        shares = self.shares(form)
        if shares == 1:
            return tensor.detach().contiguous()
        return tensor.detach().reshape(-1).tensor_split(shares)[self.mesh.group("tensor").rank]

    # ---- messages --------------------------------------------------------------------------------

    def irecv(self, buffer: Tensor, source: int, direction: Direction) -> dist.Work | None:
        """Post a receive on the channel (source, this rank, direction); any dtype."""
        return dist.irecv(
            _as_bytes(buffer), source, group=self.mesh.channels[source, self.mesh.rank, direction]
        )

    def wait(self, work: dist.Work | None, what: str, peer: int) -> None:
        """Wait for a posted message.

        Raises:
            PeerError: It did not arrive within the process group's time limit, or the peer is gone.
        """
        self.waiting(what, peer)
        try:
            assert work is not None
            work.wait()
        except RuntimeError as error:
            place = f"rank {self.mesh.rank} ({self.mesh.where})"
            text = f"{place} waited in action {what} for rank {peer}, which did not answer: {error}"
            raise PeerError(cause_first(text, self.explain())) from error
        self.waiting(what, None)

    def flush(self) -> None:
        """Wait until every message of the step has left, and drop the tensors kept for them."""
        for queue in self._outstanding.values():
            while queue:
                self._wait_sent(queue.popleft())

    def _send(
        self, what: str, crossing: Crossing, target: int, direction: Direction, header: list[Tensor]
    ) -> None:
        channel = Channel(self.mesh.rank, target, direction)
        queue = self._outstanding.setdefault(channel, deque())
        parts = (self._own_part(tensor, form) for tensor, form in crossing.pairs())
        tensors = [*header, *(part for part in parts if part.numel())]
        group = self.mesh.channels[channel]
        works = [dist.isend(_as_bytes(tensor), target, group=group) for tensor in tensors]
        # After the send, because the neighbour waits for the message.
        self._drop_sent(queue)
        queue.append(_Sent(works, tensors, what, target))

    def _drop_sent(self, queue: deque[_Sent]) -> None:
        """Drop sent tensors whose messages have left.

        It runs on every send, so that a sent tensor lives no longer than necessary.
        """
        while queue and (all(work is None or work.is_completed() for work in queue[0].works)):
            queue.popleft()
        while self.device.type == "cpu" and len(queue) >= self._limit:
            self._wait_sent(queue.popleft())

    def _wait_sent(self, message: _Sent) -> None:
        for work in message.works:
            self.wait(work, message.what, message.target)


_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8}
)
"""Dtypes that every backend sends without a view as bytes."""


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of the same memory as bytes if a backend might not support the dtype."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


def _changed(what: str, before: Form, now: Form) -> str:
    detail = (
        f"have shape {now}, but had {before} in an earlier microbatch with the same input shapes"
    )
    if str(before) == str(now):
        detail = "have another structure than in an earlier microbatch with the same input shapes"
    return (
        f"{what}: the tensors sent to the next stage {detail}. Under a pipeline, the values "
        "that pass between blocks may depend on the shapes in the batch, but not on its values"
    )
