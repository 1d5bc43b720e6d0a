"""Calls in a child process, for functions that would spoil later forks of this process."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_LIMIT_S = 600.0
_TRIAL_LIMIT_S = 15.0
_Result = TypeVar("_Result")


def in_child(function: Callable[[], _Result], *, limit_s: float = _LIMIT_S) -> _Result:
    """Return the result of ``function``, called in a forked process.

    This process then starts neither CUDA nor autograd's threads. Processes forked after either of
    them could not train.

    Raises:
        RuntimeError: The child process ended, or gave no answer within ``limit_s``.
        Exception: The exception that ``function`` raised.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            sender.send((True, function()))
        except Exception as error:
            sender.send((False, error))

    child = context.Process(target=answer, daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise RuntimeError(f"a forked helper process gave no answer for {limit_s:.0f} s")
        succeeded, result = receiver.recv()
    except EOFError as error:
        child.join(_LIMIT_S)
        raise RuntimeError(
            f"a forked helper process ended with exit code {child.exitcode}"
        ) from error
    finally:
        child.kill()
        child.join(_LIMIT_S)
    if not succeeded:
        raise result
    return result


def try_in_child(trial: Callable[[], ValueError | None]) -> None:
    """Call ``trial``, which runs the user's code, in a silent forked process.

    This process, its data and its random numbers do not change. The result is unknown if the trial
    raises an error or exceeds its limit, or if other threads of this process may hold locks.

    Raises:
        ValueError: The trial returned it.
    """

    def silent() -> ValueError | None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(devnull, output)
        torch.set_num_threads(1)
        return trial()

    if threading.active_count() > 1:
        return
    try:
        error = in_child(silent, limit_s=_TRIAL_LIMIT_S)
    except Exception:
        return
    if error is not None:
        raise error
