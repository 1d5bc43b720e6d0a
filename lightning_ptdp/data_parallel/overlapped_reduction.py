"""Reductions go on beside the backward, which waits for none of them before the end of the step.

A sum in two levels is a chain of collectives, each of which can only be asked for when the one
before is done. Somebody has to wait for
that one, and it must not be the host that runs the backward:

- On a GPU it is a stream of its own, so that nobody waits but that stream, and the host asks for
  all of them at once.
- On a CPU, where waiting holds who waits, it is a thread.

The order on each communicator is the same on all ranks. Buckets are launched in the same order
everywhere, and what follows a launch is a
function of the launches so far: the new chain's first two collectives, then the next one of each
chain before it (newest first), so that the slow sum between nodes of one bucket runs while those
inside a node of its neighbours do. The thread asks for what goes through the communicators of two
levels, which nobody else uses; a flat sum may share its communicator (``ProcessMesh``), so the host
asks for it, and the thread only waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from lightning_ptdp.data_parallel.reduction import Pending

__all__ = ["Beside"]


class Beside:
    """The reductions of one rank that are under way.

    Args:
        device: Of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._line = line_on(device)
        self._open: list[Pending] = []

    def launch(self, pending: Pending, *, shares: bool) -> None:
        """Begin a reduction, behind all that the current stream has computed.

        Args:
            pending: It; not begun yet.
            shares: Its communicator is used by others too.
        """
        if shares and self._line.has_host:
            pending.begin()
        self._line.run(partial(self._follow, pending))

    def join(self) -> None:
        """Return when all that was launched is done (on CUDA: when the current stream waits for
        it).

        Raises:
            Exception: What one of the waits raised.
        """
        self._line.run(self._drain)
        self._line.join()

    def close(self) -> None:
        """Let go of the thread, whatever it waits for."""
        self._line.close()

    def _follow(self, pending: Pending) -> None:
        pending.begin()
        self._open.append(pending)
        for each in reversed(self._open):
            each.advance()
        self._open = [each for each in self._open if not each.is_done]

    def _drain(self) -> None:
        while self._open:
            self._open.pop(0).wait()


class Line(Protocol):
    """Queue that runs tasks in order, beside the computation.

    Attributes:
        has_host: Whether it is a host thread of its own.
    """

    has_host: bool

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` behind those before, and behind what has been computed."""

    def join(self) -> None:
        """Let what is computed from now on come behind all tasks."""

    def close(self) -> None:
        """No task will come."""


def line_on(device: torch.device) -> Line:
    """The one for buffers on ``device``."""
    return _Stream(device) if device.type == "cuda" else _Thread()


class _Stream:
    """A CUDA stream. What a task allocates belongs to it, and is free again when the stream has
    passed the task's end."""

    has_host = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, task: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            task()

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def close(self) -> None:
        """There is nothing to let go of."""


class _Thread:
    """A thread, from the first task on. It is a daemon: a process whose training failed does not
    wait for what this waits for."""

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

    def join(self) -> None:
        done = threading.Event()
        self._tasks.put(done)
        done.wait()
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
                except BaseException as error:  # for whoever joins; what comes behind it would wait for a group that is broken
                    self._error = error
