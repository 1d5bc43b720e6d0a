"""Processes of all ranks of one attempt: start, monitoring, and the end of hanging processes."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from fault_campaign.kinds import FAULTS, Trap
from fault_campaign.training import Attempt, train_rank, world_size_of

__all__ = ["LAUNCHERS", "Ended", "Processes", "Shot"]

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
_POLL_S = 0.1
_PRINTED = 6000  # characters


@dataclass(kw_only=True)
class Ended:
    """Result of an attempt. Times are ``time.monotonic``.

    Attributes:
        lost: Rank that was lost, if any.
        lost_at: Time of the loss.
        began: By rank, time at which it began to contact the other ranks.
        met: By rank, time at which rank 0 had answered it; for rank 0, when it began to answer.
        steps: By rank, last optimizer step that it began; -1: none.
        finished: By rank that completed its training, time of completion.
        weights: By rank that reported it, digest of the full model's weights.
        errors: By rank that raised an error, the error and its time.
        ended_at: By rank, time at which its process had ended.
        hanging: Ranks that had to be ended. Their stacks are at the end of their output.
        printed: By rank, the end of its output.
    """

    lost: int | None = None
    lost_at: float = math.inf
    began: dict[int, float] = field(default_factory=dict)
    met: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    errors: dict[int, tuple[str, float]] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    printed: dict[int, str] = field(default_factory=dict)
    hanging: list[int] = field(default_factory=list)

    def said(self, rank: int) -> str:
        """Return the error that a rank raised, or wrote before it ended itself."""
        return self.errors[rank][0] if rank in self.errors else self.printed.get(rank, "")

    def said_at(self, rank: int) -> float:
        """Return the time at which the rank reported it."""
        return self.errors[rank][1] if rank in self.errors else self.ended_at.get(rank, math.inf)


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A signal from outside: ``fault`` (a key of ``FAULTS``) for ``victims``, ``after_s`` seconds
    after the start."""

    fault: str
    victims: tuple[int, ...]
    after_s: float


class Processes:
    """Ranks forked from a server process that has already imported torch and Lightning.

    A start takes a fraction of a second, because it needs no imports.

    Args:
        folder: Folder for the output of the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder = folder

    def run(self, attempt: Attempt, *, shot: Shot | None = None, patience_s: float) -> Ended:
        """Run an attempt to its end.

        Args:
            attempt: Training to run.
            shot: Signal for a rank, unless the rank has already ended.
            patience_s: Time after the loss of a rank. Ranks that still run then count as hanging
                and are ended.
        """
        ranks = range(world_size_of(attempt.layout))
        pipes = [self._context.Pipe(duplex=False) for _ in ranks]
        processes = [
            self._context.Process(
                target=train_rank,
                args=(rank, attempt, pipes[rank][1], self._log(rank)),
                daemon=True,
            )
            for rank in ranks
        ]
        ended = Ended(steps=dict.fromkeys(ranks, -1))
        try:
            for rank, process in enumerate(processes):
                process.start()
                pipes[rank][1].close()
            self._watch(processes, ended, attempt.trap, shot, patience_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, (pipe, _) in enumerate(pipes):
            _read(rank, pipe, ended)
            if self._log(rank).exists():
                ended.printed[rank] = self._log(rank).read_text(errors="replace")[-_PRINTED:]
        return ended

    def _watch(
        self,
        processes: list[Any],
        ended: Ended,
        trap: Trap | None,
        shot: Shot | None,
        patience_s: float,
    ) -> None:
        """Wait until all ranks have ended, except a rank that was stopped."""
        began = time.monotonic()
        deadline = began + _TRAINING_LIMIT_S
        fired = False
        while alive := {
            rank: process for rank, process in enumerate(processes) if process.exitcode is None
        }:
            if {*alive} <= {ended.lost, *(shot.victims if shot is not None and fired else ())}:
                return
            wait([process.sentinel for process in alive.values()], timeout=_POLL_S)
            now = time.monotonic()
            for rank in alive:
                if processes[rank].exitcode is not None:
                    ended.ended_at[rank] = now
            if shot is not None and not fired and now >= began + shot.after_s:
                fired = True
                for victim in set(shot.victims) - {*ended.ended_at}:
                    ended.lost, ended.lost_at = victim, time.monotonic()
                    os.kill(processes[victim].pid, FAULTS[shot.fault])
            if (
                ended.lost is None
                and trap is not None
                and trap.note.exists()
                and (noted := trap.note.read_text())
            ):
                ended.lost, ended.lost_at = trap.victim, float(noted)
            deadline = min(
                deadline,
                now + patience_s
                if ended.lost is None and ended.ended_at
                else ended.lost_at + patience_s,
            )
            if now >= deadline:
                self._end(processes, ended)
                return

    def _end(self, processes: list[Any], ended: Ended) -> None:
        for rank, process in enumerate(processes):
            if process.exitcode is None and rank != ended.lost:
                ended.hanging.append(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR2)
        time.sleep(_STACK_S)  # nothing signals that the stack has been written

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"


def _read(rank: int, pipe: Connection, ended: Ended) -> None:
    with contextlib.suppress(EOFError):
        while pipe.poll():
            name, value = pipe.recv()
            told: dict[str, dict[int, Any]] = {
                "began": ended.began,
                "met": ended.met,
                "step": ended.steps,
                "finished": ended.finished,
                "weights": ended.weights,
                "error": ended.errors,
            }
            told[name][rank] = value


@contextlib.contextmanager
def torchrun(world_size: int, nodes: int) -> Iterator[list[Mapping[str, str]]]:
    """Return the environment that torchrun sets. The store outlives the ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_RUN_ID": "faults",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
    }
    yield [
        _rank(rank, world_size, store.port, nodes)
        | shared
        | {"GROUP_RANK": str(rank * nodes // world_size)}
        for rank in range(world_size)
    ]
    del store


@contextlib.contextmanager
def popen(world_size: int, nodes: int) -> Iterator[list[Mapping[str, str]]]:
    """Return the environment that Lightning's own launcher sets.

    Rank 0 holds the store, which is lost with rank 0."""
    port = _free_port()
    yield [
        _rank(rank, world_size, port, nodes) | {"NODE_RANK": str(rank * nodes // world_size)}
        for rank in range(world_size)
    ]


@contextlib.contextmanager
def srun(world_size: int, nodes: int) -> Iterator[list[Mapping[str, str]]]:
    """Return the environment that SLURM sets. Rank 0 holds the store."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "faults",
        "SLURM_NNODES": str(nodes),
        "SLURM_NODELIST": "localhost",
    }
    local = world_size // nodes
    tasks = {"SLURM_NTASKS": str(world_size), "SLURM_NTASKS_PER_NODE": str(local)}
    yield [
        address
        | job
        | tasks
        | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % local),
            "SLURM_NODEID": str(rank // local),
        }
        for rank in range(world_size)
    ]


LAUNCHERS = {"torchrun": torchrun, "popen": popen, "srun": srun}


def _free_port() -> int:
    """Return a free port below the system's ephemeral ports.

    The system could assign an ephemeral port to another process before rank 0 uses it."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return int(probe.getsockname()[1])


def _rank(rank: int, world_size: int, port: int, nodes: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    local = str(rank % (world_size // nodes))
    return address | {"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": local}
