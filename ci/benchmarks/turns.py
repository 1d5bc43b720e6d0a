"""Several engines in one process, a few steps of each in turn: Trainers on threads of their own,
and bare loops."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import usual_heap
from torch.utils.data import Dataset

__all__ = ["ENOUGH", "BareLoop", "Contestant", "Same", "TrainerLoop", "alternate", "on_ranks"]

ENOUGH = 10**6
"""Batches; the contestants stop when nobody asks for more."""


class Same(Dataset):
    """One batch, again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return ENOUGH

    def __getitem__(self, index: int) -> Any:
        return self.batch


class Contestant(Protocol):
    """An engine that trains when it is asked to."""

    def steps(self, count: int) -> float:
        """Seconds that one of ``count`` steps took, from a barrier to a barrier."""


def alternate(
    engines: Mapping[str, Contestant],
    *,
    rounds: int,
    steps: int,
    ours: Collection[str] = ("ours",),
) -> dict[str, list[float]]:
    """Return the seconds of a step of each engine in each round; the order alternates.

    The engines ``ours`` keep freed memory in the process, the others do not. One more round warms
    up.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name in list(engines) if turn % 2 else list(reversed(engines)):
            with nullcontext() if name in ours else usual_heap():
                seconds = engines[name].steps(steps)
            if turn:
                times[name].append(seconds)
    return times


def on_ranks(measure: Callable[..., Any], *arguments: Any, ranks: int = 2) -> Any:
    """Return rank 0's result of ``measure(rank, folder, *arguments)`` on forked ranks.

    They are connected by gloo and have one thread each. The folder is a temporary one.
    """
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rest = (folder, ranks, measure, arguments, results)
        mp.start_processes(_run_rank, rest, nprocs=ranks, start_method="fork")
    return results.get()


def _run_rank(
    rank: int,
    folder: str,
    ranks: int,
    measure: Callable[..., Any],
    arguments: Sequence[Any],
    results: Any,
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = measure(rank, folder, *arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    os._exit(0)  # the Trainers' threads wait for a turn that does not come


class BareLoop:
    """Calls a function for every step.

    Args:
        step: The function.
        barrier: Called before the clock starts and before it stops.
    """

    def __init__(
        self, step: Callable[[], None], *, barrier: Callable[[], Any] = dist.barrier
    ) -> None:
        self._step, self._barrier = step, barrier

    def steps(self, count: int) -> float:
        self._barrier()
        start = time.perf_counter()
        for _ in range(count):
            self._step()
        self._barrier()
        return (time.perf_counter() - start) / count


class TrainerLoop(L.Callback):
    """A ``Trainer.fit`` on a thread, which runs only while it is asked for steps.

    Args:
        fit: Fits with the callback that it is given; the data must last.
        barrier: As of ``BareLoop``.
        batches: What counts as a step.
    """

    def __init__(
        self,
        fit: Callable[[L.Callback], Any],
        *,
        barrier: Callable[[], Any] = dist.barrier,
        batches: int = 1,
    ) -> None:
        self._barrier, self._batches = barrier, batches
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left, self._error = 0, [None]
        self._thread = threading.Thread(target=self._run, args=(fit,), daemon=True)
        self._thread.start()
        self._await()

    def steps(self, count: int) -> float:
        self._left = count * self._batches
        self._barrier()
        start = time.perf_counter()
        self._go.release()
        self._await()
        self._barrier()
        return (time.perf_counter() - start) / count

    def on_train_start(self, *_: Any) -> None:
        self._hand_over()

    def on_train_batch_end(self, *_: Any) -> None:
        self._left -= 1
        if not self._left:
            self._hand_over()

    def _hand_over(self) -> None:
        self._done.release()
        self._go.acquire()

    def _await(self) -> None:
        self._done.acquire()
        if self._error[0] is not None:
            raise self._error[0]

    def _run(self, fit: Callable[[L.Callback], Any]) -> None:
        try:
            fit(self)
        except BaseException as error:
            self._error[0] = error
            self._done.release()
