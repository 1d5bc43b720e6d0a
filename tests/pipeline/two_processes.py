"""Two processes in a process group, of which a test may lose one."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.pool import PRELOAD

__all__ = ["HANGS_S", "two_processes"]

HANGS_S = 60.0
"""Limit in seconds after which a test counts as hung."""


@contextmanager
def two_processes(
    part: Callable[..., None], *arguments: Any, limit_s: float = HANGS_S, backend: str = "gloo"
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Run ``part(rank, connection, *arguments)`` on two ranks, and kill them at the end.

    Args:
        part: Function of a module, whose process ends when it returns.
        *arguments: Its further arguments.
        limit_s: Timeout of the process group.
        backend: Backend of the process group.

    Yields:
        The processes and their connections, by rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(
            target=_run, args=(rank, there, limit_s, backend, part, *arguments), daemon=True
        )
        for rank, (_, there) in enumerate(pipes)
    ]
    connections = [here for here, _ in pipes]
    try:
        for process in processes:
            process.start()
        assert connections[0].poll(HANGS_S)
        connections[1].send(connections[0].recv())  # the port of the store
        yield processes, connections
    finally:
        for process in processes:
            process.kill()
            process.join(HANGS_S)


def _run(
    rank: int,
    parent: Connection,
    limit_s: float,
    backend: str,
    part: Callable[..., None],
    *arguments: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    limit = timedelta(seconds=HANGS_S)
    port = 0 if rank == 0 else parent.recv()
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    if rank == 0:
        parent.send(store.port)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=limit_s)
    )
    part(rank, parent, *arguments)
    os._exit(0)  # gloo's destructors wait for the peer
