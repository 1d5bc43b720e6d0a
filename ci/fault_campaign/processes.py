"""All ranks of one attempt as processes: started, watched until they have ended, ended if they hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from fault_campaign.training import Attempt, train_rank, world_size_of

__all__ = ["Ended", "Processes", "agent_store", "own_store"]

_PRELOAD = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_ptdp",
    "lightning_ptdp.models",
    "lightning_ptdp.data.loader",
]
_TRAINING_LIMIT_S = 120.0
_STACK_S = 1.0
_PRINTED = 6000  # characters


@dataclass(kw_only=True)
class Ended:
    """What became of an attempt.

    Attributes:
        killed: The rank that died by SIGKILL, if one did.
        after_s: Time from its death until the last of the others had ended.
        steps: By rank, the last optimizer step that it began; -1: none.
        weights: By rank that finished, the digest of the whole model's weights.
        errors: By rank that raised, what.
        hanging: Ranks that had to be ended; their stacks are the last thing that they printed.
        printed: By rank, the end of what it printed.
    """

    killed: int | None = None
    after_s: float = 0.0
    steps: dict[int, int] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    printed: dict[int, str] = field(default_factory=dict)
    hanging: list[int] = field(default_factory=list)


class Processes:
    """Forks ranks from a server that has torch and Lightning loaded: a start costs a fraction of a second and not the imports.

    Args:
        folder: For what the ranks print.
    """

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder = folder

    def run(self, attempt: Attempt, *, kill: tuple[int, float] | None = None, patience_s: float) -> Ended:
        """Run an attempt to its end.

        Args:
            attempt: What to train.
            kill: (rank, seconds): kill this rank so long after the start, unless it has ended.
            patience_s: Ranks that are there so long after the first has died hang, and are ended.
        """
        ranks = range(world_size_of(attempt.layout))
        pipes = [self._context.Pipe(duplex=False) for _ in ranks]
        processes = [
            self._context.Process(target=train_rank, args=(rank, attempt, pipes[rank][1], self._log(rank)), daemon=True)
            for rank in ranks
        ]
        ended = Ended(steps=dict.fromkeys(ranks, -1))
        try:
            for rank, process in enumerate(processes):
                process.start()
                pipes[rank][1].close()
            self._watch(processes, ended, kill, patience_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, (pipe, _) in enumerate(pipes):
            _read(rank, pipe, ended)
            if self._log(rank).exists():
                ended.printed[rank] = self._log(rank).read_text(errors="replace")[-_PRINTED:]
        return ended

    def _watch(self, processes: list[Any], ended: Ended, kill: tuple[int, float] | None, patience_s: float) -> None:
        began, died = time.monotonic(), None
        deadline = began + _TRAINING_LIMIT_S
        while alive := [process for process in processes if process.exitcode is None]:
            limit = deadline
            if kill is not None and died is None:
                limit = min(deadline, began + kill[1])
            wait([process.sentinel for process in alive], timeout=max(0.0, limit - time.monotonic()))
            if kill is not None and died is None and time.monotonic() >= began + kill[1]:
                processes[kill[0]].kill()
                kill = None
            for rank, process in enumerate(processes):
                if died is None and process.exitcode is not None:
                    if process.exitcode == -signal.SIGKILL:
                        ended.killed = rank
                    died = time.monotonic()
                    deadline = died + patience_s
            if time.monotonic() >= deadline:
                self._end(processes, ended)
        ended.after_s = time.monotonic() - (died if died is not None else began)

    def _end(self, processes: list[Any], ended: Ended) -> None:
        for process in processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR2)
        time.sleep(_STACK_S)  # there is no word that a stack is written
        for rank, process in enumerate(processes):
            if process.exitcode is None:
                ended.hanging.append(rank)
                process.kill()
                process.join()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"


def _read(rank: int, pipe: Connection, ended: Ended) -> None:
    with contextlib.suppress(EOFError):
        while pipe.poll():
            name, value = pipe.recv()
            {"step": ended.steps, "weights": ended.weights, "error": ended.errors}[name][rank] = value


@contextlib.contextmanager
def agent_store(world_size: int) -> Iterator[Mapping[str, str]]:
    """The variables that torchrun sets: the store lives outside the ranks, and outlives them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        **_variables(world_size, store.port),
        "TORCHELASTIC_RUN_ID": "faults",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    del store


@contextlib.contextmanager
def own_store(world_size: int) -> Iterator[Mapping[str, str]]:
    """What Lightning's own launcher sets: rank 0 keeps the store, which dies with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield {**_variables(world_size, port), "NODE_RANK": "0"}


def _variables(world_size: int, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
