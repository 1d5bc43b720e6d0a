"""A process group over gloo with NCCL's semantics, registered as the backend "queued".

Programs that rely on gloo's more tolerant behaviour fail on it.

- Each communicator runs its operations strictly in the order of issue. A message or a collective
  completes when all its ranks have started it.
- The first use of a connection (messages of two ranks in a group, or a group's collectives) blocks
  every host until all its ranks have joined.
- ``wait`` returns immediately. Later computation with the tensors, and later operations on any
  communicator, run after the operation, as on a stream. Using the tensors of an operation without a
  wait raises ``RaceError``; its outputs hold NaN.
- An operation whose peer is lost never completes.

Computation runs immediately on the host. A torch operation blocks the host until its input tensors
are available.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.shims.torch_distributed import is_communication_error
from tests.nccl_calls import Call
from tests.queued_host import HOST, RaceError, Run, Transfer, habits

__all__ = ["HOST", "LIMIT", "RaceError", "habits"]

LIMIT = timedelta(seconds=60)
"""Time limit for opening a connection."""
_GLOO_LIMIT = timedelta(minutes=5)


def _work(inner: dist.ProcessGroupGloo, queue: SimpleQueue[Transfer | None]) -> None:
    while (transfer := queue.get()) is not None:
        for before in transfer.after:
            before._ended.wait()
        try:
            with torch.no_grad():  # each thread has its own
                transfer.run(inner)
        except Exception as error:
            if is_communication_error(error):
                return  # not reported, as on a GPU
            transfer.error = error
        transfer.end()
        del transfer


@dataclass(frozen=True)
class _Message:
    """One end of a message; ``rank`` is the group rank of the peer."""

    sends: bool
    tensors: list[Tensor]
    rank: int

    def start(self, inner: dist.ProcessGroupGloo) -> Any:
        return (inner.send if self.sends else inner.recv)(self.tensors, self.rank, 0)

    def confirm(self, inner: dist.ProcessGroupGloo) -> Any:
        return (inner.recv if self.sends else inner.send)([torch.zeros(1)], self.rank, 1)


def _exchange(messages: Sequence[_Message]) -> Run:
    """Return a function that runs all messages at once.

    A send completes when its message has been received.
    """

    def run(inner: dist.ProcessGroupGloo) -> None:
        for part in (_Message.start, _Message.confirm):
            for work in [part(message, inner) for message in messages]:
                work.wait()

    return run


class Queued(dist.ProcessGroup):
    """The process group of this backend: one communicator per group."""

    supports_coalescing = True

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.own, self.identity = self.ranks[self.rank()], (options.group_id, self.ranks)
        self._store, self._limit = options.store, min(LIMIT, options.timeout)
        inner = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self._store), self.rank(), self.size(), timeout=_GLOO_LIMIT
        )
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._batch: list[_Message] | None = None
        self._met: set[tuple[str, tuple[int, ...]]] = set()
        threading.Thread(target=_work, args=(inner, self._queue), daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    # ---- issuing ---------------------------------------------------------------------------------

    def _issue(
        self,
        what: str,
        parts: Sequence[Any],
        run: Run,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> Transfer:
        transfer = Transfer(Call(what, self.identity, tuple(parts)), run, reads, writes)
        HOST.issue(transfer)
        self._queue.put(transfer)
        return transfer

    def _collective(
        self, what: str, args: Sequence[Any], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> Transfer:
        self._meet("collectives", [self.ranks])
        parts = [(tensor.numel(), str(tensor.dtype)) for tensor in reads or writes]
        return self._issue(
            what, parts, lambda inner: getattr(inner, what)(*args).wait(), reads, writes
        )

    def _message(self, message: _Message) -> Transfer | None:
        if self._batch is not None:
            self._batch.append(message)
            return None
        return self._messages([message], "messages")

    def _messages(self, messages: Sequence[_Message], kind: str) -> Transfer:
        ends = [(self.own, self.ranks[message.rank]) for message in messages]
        self._meet(kind, ends)
        sent, received = (
            [t for message in messages if message.sends is sends for t in message.tensors]
            for sends in (True, False)
        )
        lines = [
            end if message.sends else end[::-1] for end, message in zip(ends, messages, strict=True)
        ]
        parts = [
            (*line, message.tensors[0].numel())
            for line, message in zip(lines, messages, strict=True)
        ]
        what = "batch" if kind == "batches" else "send" if sent else "recv"
        return self._issue(what, parts, _exchange(messages), sent, received)

    def _meet(self, kind: str, ends: Sequence[Sequence[int]]) -> None:
        """Block the host at the first use of a connection until all its ranks have joined."""
        fresh = {(kind, tuple(sorted(ranks))) for ranks in ends if len(ranks) > 1} - self._met
        for connection in fresh:
            self._met.add(connection)
            HOST.met.append((kind, self.ranks, connection[1]))
            self._store.set(f"{connection}/{self.own}", "here")
        for connection in fresh:
            for rank in connection[1]:
                try:
                    self._store.wait([f"{connection}/{rank}"], self._limit)
                except RuntimeError as error:
                    raise TimeoutError(
                        f"rank {self.own} hangs: rank {rank} does not come to {kind} of "
                        f"{connection[1]}"
                    ) from error

    # ---- interface for torch.distributed ---------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Transfer:
        self._meet("collectives", [self.ranks])
        averages = options is not None and options.reduceOp == dist.ReduceOp.AVG

        def run(inner: dist.ProcessGroupGloo) -> None:
            if averages:
                options.reduceOp = dist.ReduceOp.SUM  # gloo does not average integers
            inner.allreduce(tensors, options).wait()
            for tensor in tensors if averages else ():
                tensor.div_(
                    self.size(), rounding_mode=None if tensor.is_floating_point() else "floor"
                )

        parts = [(tensor.numel(), str(tensor.dtype)) for tensor in tensors]
        return self._issue("allreduce", parts, run, tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Transfer:
        is_root = options.rootRank == self.rank()
        return self._collective(
            "broadcast", (tensors, options), *((tensors, ()) if is_root else ((), tensors))
        )

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> Transfer:
        return self._collective("_allgather_base", (output, source, options), [source], [output])

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Transfer:
        return self._collective(
            "_reduce_scatter_base", (output, source, options), [source], [output]
        )

    def alltoall_base(self, output: Tensor, source: Tensor, *rest: Any) -> Transfer:
        return self._collective("alltoall_base", (output, source, *rest), [source], [output])

    # Names since torch 2.13. The other names are needed until torch 2.13.
    all_gather_single, reduce_scatter_single, all_to_all_single = (
        _allgather_base,
        _reduce_scatter_base,
        alltoall_base,
    )

    def allgather(
        self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any = None
    ) -> Transfer:
        return self._collective(
            "allgather", (outputs, sources, options), sources, list(chain(*outputs))
        )

    def gather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any) -> Transfer:
        return self._collective(
            "gather", (outputs, sources, options), sources, list(chain(*outputs))
        )

    def barrier(self, opts: Any = None) -> Transfer:
        return self._collective("barrier", (opts,), (), ())

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Transfer | None:
        return self._message(_Message(True, tensors, target))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Transfer | None:
        return self._message(_Message(False, tensors, source))

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Transfer:
        messages, self._batch = self._batch, None
        assert messages
        return self._messages(messages, "batches")

    def _get_backend(self, device: torch.device) -> Queued:
        return self

    def _set_default_timeout(self, limit: timedelta) -> None:
        self._limit = limit

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "queued"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _make(options: Any, _: Any) -> Queued:
    return Queued(options)


dist.Backend.register_backend("queued", _make, extended_api=True, devices=["cpu"])
