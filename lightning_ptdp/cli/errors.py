"""Which errors are the user's, and how they are said."""

from __future__ import annotations

import re
import signal
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from lightning_ptdp.option_types import nearest
from lightning_ptdp.requirements import read_declared
from lightning_ptdp.signals import handled

__all__ = ["Terminated", "UserError", "WorkerFailure", "explain", "nearest", "terminate_on_sigterm", "worker_failure"]


# By name: the classes live in modules that import torch, and from a worker only the name comes back.
_MENDABLE = ("ValueError", "FileNotFoundError", "PermissionError", "MisconfigurationException", "RequirementError")
_OUR_VALUE_ERRORS = ("UserError", "CheckpointError", "CorpusError", "TokenizerError", "StoreError", "PlanError")


class UserError(ValueError):
    """What was asked for cannot be done; the message says what would work."""


class Terminated(BaseException):
    """SIGTERM arrived. Not an ``Exception``, so that nobody mistakes it for a failure that can be survived."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """An error in a worker process, of which only the text came back."""

    message: str
    mendable: bool


def explain(error: BaseException) -> str | None:
    """Return the message for an error that the user can mend; None for any other."""
    if isinstance(error, ArgumentError):
        return str(error.message)
    if isinstance(error, ModuleNotFoundError):
        return next((library.missing for library in read_declared() if library.name == error.name), None)
    if any(kind.__name__ in _MENDABLE for kind in type(error).__mro__):
        return str(error)
    return None


def worker_failure(error: BaseException) -> WorkerFailure | None:
    """The failure behind the errors of torch's launcher.

    Which process, and the error's last line if that says it all; or the signal by which a process was ended.
    """
    text, kind = getattr(error, "msg", None), type(error).__name__
    if isinstance(text, str) and kind == "ProcessExitedException":
        return WorkerFailure(message=_ended(text, getattr(error, "signal_name", None)), mendable=False)
    if not isinstance(text, str) or kind != "ProcessRaisedException":
        return None
    last = re.findall(r"^([A-Za-z_][\w.]*): (.*)", text, re.MULTILINE)
    if last and last[-1][0].rpartition(".")[2] in (*_MENDABLE, *_OUR_VALUE_ERRORS):
        start = text.rindex(f"{last[-1][0]}: {last[-1][1]}") + len(last[-1][0]) + 2
        return WorkerFailure(message=text[start:].strip(), mendable=True)
    return WorkerFailure(message=text.strip(), mendable=False)


def _ended(text: str, signal_name: str | None) -> str:
    why = "; the kernel does that when memory runs out" if signal_name == "SIGKILL" else ""
    return f"{text}{why}. The other processes were ended; a fit goes on from its newest checkpoint with --resume auto"


@contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``Terminated``, which unwinds like Ctrl-C does: loggers are closed and children ended."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the clean-up
        raise Terminated

    with handled(signal.SIGTERM, terminate):
        yield
