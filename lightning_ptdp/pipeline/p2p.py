"""Sends and receives between neighbouring stages: just-in-time buffers, one communicator a direction.

The shape of a hidden state is not agreed in advance. It depends on the microbatch alone, and every rank of a replica reads the same
microbatches; so the first time that a microbatch of a new signature (shapes and dtypes of its tensors) crosses a boundary, a small
header goes ahead, and afterwards both sides know the shape without asking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.pipeline.stage import Crossing

__all__ = ["PeerError", "Receipt", "Transport"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
_MAX_DIMS = 8


class PeerError(RuntimeError):
    """A neighbour did not answer within the limit or went away; the message names the rank and the action."""


@dataclass(frozen=True)
class _Meta:
    shape: tuple[int, ...]
    dtype: torch.dtype
    wrap: int

    def encode(self, device: torch.device) -> Tensor:
        if len(self.shape) > _MAX_DIMS:
            raise ValueError(f"a hidden state of {len(self.shape)} dimensions crosses a stage boundary; at most {_MAX_DIMS} can")
        padding = [0] * (_MAX_DIMS - len(self.shape))
        values = [_DTYPES.index(self.dtype), self.wrap, len(self.shape), *self.shape, *padding]
        return torch.tensor(values, dtype=torch.int64, device=device)

    @classmethod
    def decode(cls, header: Tensor) -> _Meta:
        dtype, wrap, dims, *shape = header.tolist()
        return cls(tuple(shape[:dims]), _DTYPES[dtype], wrap)


@dataclass(eq=False)
class Receipt:
    """A receive that was asked for. ``wait`` returns what arrived.

    Attributes:
        meta: Shape, once known; until then ``buffer`` is for the header that tells it.
        work: What was posted; None while an earlier header of the channel is awaited, since messages arrive in order.
    """

    transport: Transport
    what: str
    source: int
    direction: str
    key: tuple[str, Hashable] | None = None
    meta: _Meta | None = None
    buffer: Tensor | None = None
    work: Any = None

    def post(self) -> bool:
        """Post the receive of the hidden state if its shape is known, else of its header; whether it was the former."""
        if self.meta is None and self.key is not None:
            self.meta = self.transport.known.get(self.key)
        shape, dtype = ((3 + _MAX_DIMS,), torch.int64) if self.meta is None else (self.meta.shape, self.meta.dtype)
        self.buffer = torch.empty(shape, dtype=dtype, device=self.transport.device)
        self.work = self.transport.irecv(self.buffer, self.source, self.direction)
        return self.meta is not None

    def learn(self) -> None:
        """Wait for the header and post the receive of the hidden state behind it."""
        assert self.meta is None and self.buffer is not None and self.key is not None
        self.transport.wait(self.work, self.what, self.source)
        self.transport.known[self.key] = _Meta.decode(self.buffer)
        self.post()

    def wait(self) -> Crossing:
        """The hidden state (or gradient) with its structure."""
        while self.meta is None or self.work is None:
            self.transport.advance(self.source)
        self.transport.wait(self.work, self.what, self.source)
        assert self.buffer is not None
        return Crossing(self.buffer, self.meta.wrap)


@dataclass
class Transport:
    """Point-to-point messages of one pipeline rank.

    Attributes:
        mesh: Supplies the communicators.
        device: Where received tensors are made.
        known: Shapes of hidden states by (boundary, signature), learnt from headers.
    """

    mesh: ProcessMesh
    device: torch.device
    known: dict[tuple[str, Hashable], _Meta] = field(default_factory=dict)
    _announced: dict[tuple[str, Hashable], _Meta] = field(default_factory=dict)
    _outstanding: list[tuple[Any, Tensor, str, int]] = field(default_factory=list)
    _queues: dict[int, deque[Receipt]] = field(default_factory=dict)

    def send_forward(self, what: str, crossing: Crossing, *, target: int, signature: Hashable) -> None:
        """Send a hidden state to global rank ``target``; returns at once."""
        tensor = crossing.tensor.detach().contiguous()
        key = (what.partition(".")[0], signature)
        meta = _Meta(tuple(tensor.shape), tensor.dtype, crossing.wrap)
        if key not in self._announced:
            self._announced[key] = meta
            self._isend(meta.encode(self.device), target, "forward", what)
        elif self._announced[key] != meta:
            raise ValueError(
                f"{what}: the hidden state has shape {meta.shape} {meta.dtype}, but a microbatch of the same input shapes gave "
                f"{self._announced[key].shape} {self._announced[key].dtype} before; under a pipeline the shape between blocks may "
                "depend on the shapes in the batch, not on its values"
            )
        self._isend(tensor, target, "forward", what)

    def receive_forward(self, what: str, *, source: int, signature: Hashable) -> Receipt:
        """Post the receive of a hidden state from global rank ``source``."""
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

    def send_backward(self, what: str, gradient: Tensor, *, target: int) -> None:
        """Send the gradient of a hidden state to the rank that produced it; returns at once."""
        self._isend(gradient.detach().contiguous(), target, "backward", what)

    def receive_backward(self, what: str, *, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Receipt:
        """Post the receive of a gradient; it has the shape and dtype of the hidden state that was sent."""
        receipt = Receipt(self, what, source, "backward", meta=_Meta(tuple(shape), dtype, 0))
        receipt.post()
        return receipt

    def irecv(self, buffer: Tensor, source: int, direction: str) -> Any:
        """Post a raw receive on the channel (source, this rank, direction)."""
        return dist.irecv(buffer, source, group=self.mesh.channels[source, self.mesh.rank, direction])

    def wait(self, work: Any, what: str, peer: int) -> None:
        """Wait for a posted message.

        Raises:
            PeerError: It did not come within the process group's time limit, or the peer is gone.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.mesh.rank} ({self.mesh.coordinates}) waited in action {what} for rank {peer}, which did not answer: {error}"
            ) from error

    def flush(self) -> None:
        """Wait until every message of the step has left, and drop the tensors that were kept for them."""
        for work, _, what, peer in self._outstanding:
            self.wait(work, what, peer)
        self._outstanding.clear()

    def _isend(self, tensor: Tensor, target: int, direction: str, what: str) -> None:
        # A sent tensor must live until its message has left, and no longer: drop the finished ones on every send.
        self._outstanding = [entry for entry in self._outstanding if not entry[0].is_completed()]
        work = dist.isend(tensor, target, group=self.mesh.channels[self.mesh.rank, target, direction])
        self._outstanding.append((work, tensor, what, target))
