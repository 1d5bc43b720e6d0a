"""A persistent pool of worker processes for distributed tests.

``run(function, world_size=4, args=(...))`` calls ``function(rank, *args)`` on four real processes
connected by gloo and returns the results by rank. Workers are forked from a server that has loaded
torch and Lightning, so a test takes milliseconds instead of the 8 seconds of an import. Every call
has a time limit (limits.py). After the limit all workers are killed and the test fails with the
stacks of the workers that did not answer and of their child processes.
"""

import contextlib
import faulthandler
import functools
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from tests.limits import Limit, running

PRELOAD = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_ptdp.strategy.ptdp",
    "lightning_ptdp.models",
    "transformers.modeling_utils",
    "tests.preloaded",
]


class WorkerFailure(AssertionError):
    """Error for a worker that raised, died or was late, with every rank's traceback."""


def _serve(connection: Connection, started_in: str, stacks: str) -> None:
    import torch
    from lightning.fabric.utilities import registry

    torch.set_num_threads(1)
    # Every Trainer looks for callbacks in the metadata of all installed packages.
    registry.entry_points = functools.cache(registry.entry_points)
    os.chdir(started_in)
    stacks_file = open(stacks, "a")  # noqa: SIM115 - as long as the process lives
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        # A Trainer restores the handlers that Python knows, which removes this one.
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2, file=stacks_file)
        try:
            with _left_as_it_was():
                reply = (True, _call(*pickle.loads(task)))
            payload = _dumps(reply)
        except BaseException:
            payload = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(payload)
        faulthandler.register(signal.SIGUSR2, file=stacks_file)  # for what hangs from here on
        # Trainers are reference cycles that keep process groups alive. Their threads would
        # accumulate, and would spin once the peers have closed their sockets.
        task = reply = payload = None
        gc.collect()
        gc.freeze()  # what is left, such as modules, stays


def _dumps(reply: Any) -> bytes:
    """Pickle a result; torch's own way takes 0.1 ms for each tensor."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
                return NotImplemented
            if value.layout != torch.strided or not value.numel():
                return NotImplemented
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (data, value.dtype, value.shape)

    buffer = io.BytesIO()
    Pickler(buffer).dump(reply)
    return buffer.getvalue()


def _tensor(data: bytes, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Restore the environment and the logging levels for the next test."""
    environment, disabled = dict(os.environ), logging.root.manager.disable
    loggers = [
        one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)
    ]
    levels = [one.level for one in loggers]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(disabled)
        for one, level in zip(loggers, levels, strict=True):
            if one.level != level:  # setting it clears the caches of all loggers
                one.setLevel(level)


def _call(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: Sequence[Any],
    env: dict,
    backend: str,
) -> Any:
    import torch
    import torch.distributed as dist

    habits: Any = contextlib.nullcontext
    if backend == "queued":
        from tests.queued import habits

    torch.manual_seed(0)
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if world_size > 1:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(hours=1),  # the pool's limit ends waiting workers
        )
    try:
        with habits():
            result = function(rank, *args)
        if dist.is_initialized():
            # A fast rank must not close connections that a slow rank is still opening.
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Pool:
    """Worker processes that are reused between tests; ``close`` ends them."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._calls = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = (),
        limit: float = 90.0,
        env: dict[str, str] | None = None,
        backend: str = "gloo",
    ) -> list[Any]:
        """Return the results of ``function(rank, *args)`` by rank.

        ``limit`` is in seconds (limits.py). ``backend`` is "gloo" or "queued" (tests/queued.py).
        """
        self._grow(world_size)
        # A worker may free its store after its answer. torch's destructor then looks for the file,
        # opens it, and would wait for as long as groups do if its folder vanished in between.
        store = os.path.join(self._folder.name, f"store-{next(self._calls)}")
        for rank in range(world_size):
            task = (function, rank, world_size, store, args, env or {}, backend)
            self._workers[rank][1].send_bytes(pickle.dumps(task))
        return self._collect(
            world_size, Limit(limit, running), getattr(function, "__name__", "function")
        )

    def _collect(self, world_size: int, limit: Limit, name: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        while waiting:
            # The peers of a failed rank wait for it, so do not wait the whole limit for them.
            grace = Limit(5.0, running) if failures else limit
            while not (answered := wait(list(waiting), 1.0)):
                if min(grace.left(), limit.left()) <= 0:
                    break
            if not answered:
                late = {
                    rank: f"no answer within the time limit\n{self._stacks(rank)}"
                    for rank in waiting.values()
                }
                failures |= late
                break
            for connection in answered:
                rank = waiting.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    good, value = False, "the worker process died"
                (results if good else failures)[rank] = value
        if failures:
            self.close()
            raise WorkerFailure(
                f"{name} failed:\n" + "\n".join(f"--- rank {r}:\n{t}" for r, t in failures.items())
            )
        return [results[rank] for rank in range(world_size)]

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            here, there = self._context.Pipe()
            args = (there, os.getcwd(), self._stacks_path(len(self._workers)))
            process = self._context.Process(target=_serve, args=args, daemon=False)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _stacks_path(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"stacks-{rank}.txt")

    def _stacks(self, rank: int) -> str:
        """Return the stacks of a worker and of its child processes.

        Each process writes its own stacks on SIGUSR2.
        """
        path = Path(self._stacks_path(rank))
        with contextlib.suppress(psutil.Error, OSError):
            worker = psutil.Process(self._workers[rank][0].pid)
            for process in (worker, *worker.children(recursive=True)):
                with path.open("a") as file:
                    command = " ".join(process.cmdline())[:80]
                    file.write(f"\nprocess {process.pid}, {process.status()}: {command}\n")
                if process.status() == psutil.STATUS_STOPPED:
                    continue  # it would write nothing
                before = path.stat().st_size
                process.send_signal(signal.SIGUSR2)
                # The end of writing is not signalled, and a process in uninterruptible sleep
                # writes nothing.
                for _ in range(20):
                    time.sleep(0.5)
                    if path.stat().st_size > before:
                        break
        return path.read_text()

    def close(self) -> None:
        """Kill all workers."""
        for process, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []


def in_new_process(part: Callable[[], None], *, limit: float = 120.0) -> int:
    """Run ``part`` in a new process without threads, which can fork others; return its exit code.

    After ``limit`` seconds (limits.py) it and its child processes are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=part)
    process.start()
    patience = Limit(limit, running)
    while process.exitcode is None and patience.left() > 0:
        process.join(1)
    if process.exitcode is None:
        assert process.pid is not None
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
        raise AssertionError(f"not ended within {limit} s: {part}")
    return process.exitcode
