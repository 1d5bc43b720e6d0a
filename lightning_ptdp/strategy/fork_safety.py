"""Calls in a child process, for functions that would spoil later forks of this process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_child"]

_LIMIT_S = 600.0
_Result = TypeVar("_Result")


def in_child(function: Callable[[], _Result]) -> _Result:
    """Return the result of ``function``, called in a forked process.

    This process then starts neither CUDA nor autograd's threads. Processes forked after either of
    them could not train.

    Raises:
        RuntimeError: The child process ended, or gave no answer within ten minutes.
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
        if not receiver.poll(_LIMIT_S):
            raise RuntimeError(f"a forked helper process gave no answer for {_LIMIT_S:.0f} s")
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
