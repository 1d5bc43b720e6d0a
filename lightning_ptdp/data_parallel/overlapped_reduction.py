"""Reductions that overlap with the backward; they are waited for at the end of the step.

A two-level sum is a chain of collectives. A collective can be requested only when the previous one
is done, so a stream or a thread must wait for it. The host thread that runs the backward must not:

- On a GPU a stream of its own waits. Only this stream waits, and the host requests all collectives
  at once.
- On a CPU, where waiting blocks the thread, a separate thread waits.

The order on each communicator is the same on all ranks. Buckets are launched in the same order
everywhere, and the collectives after a launch are a function of the launches so far. They are the
new chain's first two collectives, then the next one of each earlier chain (newest first). The slow
sum between nodes of one bucket therefore overlaps with the sums inside a node of its neighbours.

The thread requests only the collectives of the two-level communicators, which have no other users.
A flat sum may share its communicator (``ProcessMesh``), so the host requests it and the thread only
waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

import torch

from lightning_ptdp.data_parallel.reduction import PendingReduction


class OverlappedReduction:
    """The reductions of one rank that are in progress.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._line = line_on(device)
        self._open: list[PendingReduction] = []

    def launch(self, pending: PendingReduction, *, shares: bool) -> None:
        """Begin a reduction, after everything that the current stream has computed.

        Args:
            pending: The reduction; not begun yet.
            shares: True if its communicator has other users.
        """
        if shares and self._line.has_host:
            pending.begin()
        self._line.run(partial(self._follow, pending))

    def mark(self) -> Callable[[], object]:
        """Return a function that waits until what has been launched so far has advanced.

        A sum of one level is then done.
        """
        return self._line.mark()

    def join(self) -> None:
        """Return when all launched reductions are done.

        On CUDA: when the current stream waits for them.

        Raises:
            Exception: The exception of a wait that failed.
        """
        self._line.run(self._drain)
        self._line.join()

    def close(self) -> None:
        """Release the thread, even if it is waiting."""
        self._line.close()

    def _follow(self, pending: PendingReduction) -> None:
        pending.begin()
        self._open.append(pending)
        for reduction in reversed(self._open):
            reduction.advance()
        self._line.keep([reduction for reduction in self._open if reduction.is_done])
        self._open = [reduction for reduction in self._open if not reduction.is_done]

    def _drain(self) -> None:
        for reduction in self._open:
            reduction.wait()
        self._line.keep(self._open)
        self._open = []


# ---- Queues that run tasks in order, concurrently with the computation --------------------------


class _Stream:
    """A CUDA stream.

    Memory that a task allocates belongs to the stream, and becomes free when the stream has passed
    the task's end. Memory of other streams is held until later computation waits for the tasks that
    use it. (With ``record_stream`` instead, it would be free only when the device has passed them,
    and the host runs ahead by a whole backward.)
    """

    has_host = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._used: list[PendingReduction] = []

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` after the previous tasks and after the work computed so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            task()

    def mark(self) -> Callable[[], object]:
        """Return a function that orders later computation after the tasks queued so far."""
        event = self._stream.record_event()
        used = self._used
        self._used = []

        def wait() -> None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)
            used.clear()

        return wait

    def keep(self, done: Iterable[PendingReduction]) -> None:
        """Hold the memory of reductions that are done, as described above."""
        self._used += done

    def join(self) -> None:
        """Order all later computation after the queued tasks."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._used = []

    def close(self) -> None:
        """Do nothing: a stream needs no release."""


class _Thread:
    """A host thread with the same methods, started by the first task.

    It is a daemon, so that a process whose training failed does not wait for it.
    """

    has_host = True

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="reductions", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def mark(self) -> Callable[[], object]:
        done = threading.Event()
        self._tasks.put(done)
        return done.wait

    def keep(self, done: Iterable[PendingReduction]) -> None:
        """Do nothing: what is done uses no memory."""

    def join(self) -> None:
        self.mark()()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            elif self._error is None:
                try:
                    task()
                except BaseException as error:  # raised by join(); later tasks would hang
                    self._error = error


def line_on(device: torch.device) -> _Stream | _Thread:
    """Return the queue for buffers on ``device``."""
    return _Stream(device) if device.type == "cuda" else _Thread()
