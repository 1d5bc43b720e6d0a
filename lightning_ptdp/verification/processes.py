"""One training in a session of its own, with a limit of its time; no process of it is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lightning_ptdp.verification.errors import VerificationError

__all__ = ["run_apart"]

_SHOWN = 2000


def run_apart(function: Callable[[], None], *, name: str, log: Path, limit_s: float) -> None:
    """Call ``function`` in a forked process; whatever it and the processes that it starts print goes to ``log``.

    Raises:
        Exception: What ``function`` raised, if it can be pickled.
        VerificationError: The process was late or ended; holds the end of the log.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, sender, log))
    child.start()
    sender.close()
    error: Exception | None = None
    try:
        if receiver.poll(limit_s):
            error = receiver.recv()
        else:
            error = VerificationError(f"{name} was not finished after limit_s={limit_s:g} seconds")
    except EOFError:
        child.join()
        error = VerificationError(f"{name} ended with exit code {child.exitcode}")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # it leads a session of its own
        child.kill()
        child.join()
    if error is not None:
        with contextlib.suppress(OSError):
            error.add_note(f"{name} printed:\n{log.read_text(errors='replace')[-_SHOWN:]}")
        raise error


def _answer(function: Callable[[], None], sender: Connection, log: Path) -> None:
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)  # OpenMP's threads of the parent do not exist here
    error: Exception | None = None
    try:
        function()
    except Exception as raised:
        error = raised
    try:
        sender.send(error)
    except Exception:
        sender.send(VerificationError(f"{type(error).__name__}: {error}"))
