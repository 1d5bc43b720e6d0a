"""Which errors are the user's, and how they are said."""

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
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.base.requirements import read_declared
from lightning_ptdp.base.signals import handled

__all__ = [
    "Terminated",
    "UserError",
    "WorkerFailure",
    "explain",
    "nearest",
    "terminate_on_sigterm",
    "worker_failure",
]


# By name, because importing Lightning's class would import torch.
_MENDABLE = (
    "ValueError",
    "FileNotFoundError",
    "PermissionError",
    "MisconfigurationException",
    "RequirementError",
)


class UserError(PTDPError, ValueError):
    """A request that cannot be honoured; the message names what would work."""


class Terminated(BaseException):
    """SIGTERM arrived. Not an ``Exception``, so that nobody mistakes it for a failure that can be
    survived."""


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
        return next(
            (library.missing for library in read_declared() if library.name == error.name), None
        )
    return str(error) if _is_mendable(type(error)) else None


def worker_failure(error: BaseException) -> WorkerFailure | None:
    """The failure behind the errors of torch's launcher.

    Which process, and the error's last line if that says it all; or the signal by which a process
    was ended."""
    text, kind = getattr(error, "msg", None), type(error).__name__
    if isinstance(text, str) and kind == "ProcessExitedException":
        return WorkerFailure(
            message=_ended(text, getattr(error, "signal_name", None)), mendable=False
        )
    if not isinstance(text, str) or kind != "ProcessRaisedException":
        return None
    for line in reversed(list(re.finditer(r"^([A-Za-z_][\w.]*): ", text, re.MULTILINE))):
        error_type = _class_of(line[1])
        if issubclass(error_type, BaseException):  # else a line of the message
            if _is_mendable(error_type):
                return WorkerFailure(message=text[line.end() :].strip(), mendable=True)
            break
    return WorkerFailure(message=text.strip(), mendable=False)


def _is_mendable(kind: type) -> bool:
    return any(base.__name__ in _MENDABLE for base in kind.__mro__)


def _class_of(name: str) -> type:
    """Return the error class of a traceback's last line, such as ``ValueError`` or
    ``lightning_ptdp.data.data_error.DataError``.

    Only this package's modules are imported for it. The class is ``object`` if it cannot be found.
    """
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] == __name__.partition(".")[0]:
        with suppress(ImportError):  # a line of a message that only looks like a class
            import_module(module)
    found = getattr(sys.modules.get(module or "builtins"), attribute, object)
    return found if isinstance(found, type) else object


def _ended(text: str, signal_name: str | None) -> str:
    why = "; the kernel does that when memory runs out" if signal_name == "SIGKILL" else ""
    return f"{text}{why}. The other processes were ended; a fit goes on from its newest checkpoint with --resume auto"


@contextmanager
def terminate_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into ``Terminated``, which unwinds like Ctrl-C does: loggers are closed and
    children ended."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the clean-up
        raise Terminated

    with handled(signal.SIGTERM, terminate):
        yield
