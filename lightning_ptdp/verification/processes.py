"""The ranks of one training in forked processes, with a limit of their time; no process of them is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.verification.errors import VerificationError

__all__ = ["run_ranks"]

_SHOWN = 2000


def run_ranks(function: Callable[[], None], count: int, *, name: str, log: Path, limit_s: float) -> None:
    """Call ``function`` in forked processes, as Lightning's ranks; whatever they print goes to ``log``.

    Raises:
        Exception: The first that a rank raised, if it can be pickled.
        VerificationError: A rank was late or ended.
    """
    context, deadline = multiprocessing.get_context("fork"), time.monotonic() + limit_s
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waiting: list[Any] = []
    children: list[Any] = []
    try:
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_run_rank, args=(function, rank, port if count > 1 else None, sender, log))
            child.start()
            sender.close()
            waiting.append(receiver)
            children.append(child)
        error: Exception | None = None
        while waiting and error is None:
            ready: list[Any] = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                error = VerificationError(f"{name} was not finished after limit_s={limit_s:g} seconds")
            for receiver in ready:
                waiting.remove(receiver)
                try:
                    error = error or receiver.recv()
                except EOFError:
                    error = error or VerificationError(f"a process of {name} was lost")
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.join()
    if error is not None:
        if not isinstance(error, (ValueError, VerificationError)) and type(error).__name__ != "MisconfigurationException":
            error = VerificationError(f"{name} failed: {type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            error.add_note(f"{name} printed:\n{log.read_text(errors='replace')[-_SHOWN:]}")
        raise error


def _run_rank(function: Callable[[], None], rank: int, port: int | None, sender: Connection, log: Path) -> None:
    os.setpgid(0, 0)
    vars(sys).pop("ps1", None)  # nobody types here
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if port is not None:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)  # OpenMP's threads of the parent do not exist here
    error: Exception | None = None
    try:
        function()
    except Exception as raised:
        traceback.print_exc()
        error = raised
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = VerificationError(f"{type(error).__name__}: {error}")
    sender.send(error)
