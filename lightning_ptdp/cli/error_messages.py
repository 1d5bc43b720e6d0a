"""Errors that the user can fix, and their messages."""

from __future__ import annotations

import re
import signal
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.requirements import read_declared
from lightning_ptdp.base.signals import handled

# Classes are listed by name, because an import of Lightning's class would import torch.
_FIXABLE = (
    "ValueError",
    "FileNotFoundError",
    "PermissionError",
    "MisconfigurationException",
    "RequirementError",
)


class UserError(PTDPError, ValueError):
    """A request that cannot be fulfilled. The message names what would work."""


class Terminated(BaseException):
    """Arrival of SIGTERM.

    The class does not derive from ``Exception``, so that no handler treats it as a failure to
    recover from.
    """


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """An error of a worker process, of which only the text is known."""

    message: str
    fixable: bool


def explain(error: BaseException) -> str | None:
    """Return the message of an error that the user can fix, or None for any other error."""
    if isinstance(error, ArgumentError):
        return str(error.message)
    if isinstance(error, ModuleNotFoundError):
        return next(
            (library.missing for library in read_declared() if library.name == error.name), None
        )
    return str(error) if _is_fixable(type(error)) else None


def worker_failure(error: BaseException) -> WorkerFailure | None:
    """Return the worker's failure behind an error of torch's launcher, or None.

    If the user can fix the failure, the message is the last line of the worker's traceback.
    Otherwise it is the launcher's whole text, or the signal that ended the process.
    """
    text = getattr(error, "msg", None)
    kind = type(error).__name__
    if isinstance(text, str) and kind == "ProcessExitedException":
        return WorkerFailure(
            message=_ended(text, getattr(error, "signal_name", None)), fixable=False
        )
    if not isinstance(text, str) or kind != "ProcessRaisedException":
        return None
    for line in reversed(list(re.finditer(r"^([A-Za-z_][\w.]*): ", text, re.MULTILINE))):
        error_type = _class_of(line[1])
        if issubclass(error_type, BaseException):  # else the match is a line of the message itself
            if _is_fixable(error_type):
                return WorkerFailure(message=text[line.end() :].strip(), fixable=True)
            break
    return WorkerFailure(message=text.strip(), fixable=False)


def _is_fixable(kind: type) -> bool:
    return any(base.__name__ in _FIXABLE for base in kind.__mro__)


def _class_of(name: str) -> type:
    """Return the error class that a traceback's last line names.

    Only modules of this package are imported for it. The class is ``object`` if it cannot be found.

    Args:
        name: Class name, such as ``ValueError`` or ``lightning_ptdp.data.data_error.DataError``.
    """
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] == __name__.partition(".")[0]:
        with suppress(ImportError):  # a line of a message that only looks like a class
            import_module(module)
    candidate = getattr(sys.modules.get(module or "builtins"), attribute, object)
    return candidate if isinstance(candidate, type) else object


def _ended(text: str, signal_name: str | None) -> str:
    cause = "; the kernel does this when memory runs out" if signal_name == "SIGKILL" else ""
    return (
        f"{text}{cause}. The other processes were ended. To resume a fit from its newest "
        "checkpoint, use --resume auto"
    )


@contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``Terminated`` while the block runs.

    The exception unwinds the stack like Ctrl-C, so that loggers are closed and child processes are
    ended.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not break the cleanup
        raise Terminated

    with handled(signal.SIGTERM, terminate):
        yield
