"""Failures of a command: their messages, and the end of what it has started."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.requirements import read_declared
from lightning_ptdp.base.signals import HandlerOfProcess, handled

if TYPE_CHECKING:
    import psutil
    from lightning.pytorch import Trainer

# Classes are listed by name, because an import of Lightning's class would import torch.
_FIXABLE = (
    "ValueError",
    "FileNotFoundError",
    "PermissionError",
    "MisconfigurationException",
    "RequirementError",
)
# Beginnings of an OSError's text, of which alone a worker's failure consists.
_DISK_FULL = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
_TRACEBACK_LINE = re.compile(
    r'^ *File "(?P<file>[^"<]+\.py)", line (?P<number>\d+), in (?P<name>.+)$', re.MULTILINE
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
    return _message(type(error), str(error))


def worker_failure(error: BaseException) -> WorkerFailure | None:
    """Return the worker's failure behind an error of torch's launcher, or None.

    If the user can fix the failure, the message is the last line of the worker's traceback, with
    the place in the user's code. Otherwise it is the launcher's full text, or the signal that ended
    the process.
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
            message = _message(error_type, text[line.end() :].strip())
            if message is not None:
                return WorkerFailure(message=message + users_line(text), fixable=True)
            break
    return WorkerFailure(message=text.strip(), fixable=False)


def users_line(text: str) -> str:
    """Return the innermost line of the user's code in a traceback, as the end of a message.

    It is empty if the traceback has only lines of libraries.
    """
    script = os.path.realpath(sys.argv[0])
    folders = sysconfig.get_paths()
    libraries = (
        *(folders[name] for name in ("stdlib", "purelib", "platlib", "scripts")),
        str(Path(__file__).parents[1]),
    )
    for line in reversed(list(_TRACEBACK_LINE.finditer(text))):
        file = line["file"]
        if not file.startswith(libraries) and os.path.realpath(file) != script:
            return f" ({file}:{line['number']}, in {line['name']}; --debug shows the traceback)"
    return ""


def _message(kind: type, text: str) -> str | None:
    """Return the message of an error if the user can fix it."""
    if issubclass(kind, OSError) and text.startswith(_DISK_FULL):
        return f"{text}. Free space, or write to another disk"
    return text if any(base.__name__ in _FIXABLE for base in kind.__mro__) else None


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
    ended. A forked process, which has nothing to clean up before it has a handler of its own, ends
    at once.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        if handler.is_inherited:
            if signal.getsignal(number) is not handler:
                return  # called by the handler of Lightning, which records the signal
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not break the cleanup
        raise Terminated

    handler = HandlerOfProcess(terminate)
    with handled(signal.SIGTERM, handler):
        yield


# ---- End of the worker processes that a launcher started ---------------------------------------


_PATIENCE_S = 3.0
_GRACE_S = 10.0
_SAVING_S = 60.0


@contextmanager
def ending_workers(trainer: Trainer) -> Iterator[None]:
    """Stop all workers of ``trainer`` if the block ends with an error.

    Workers are interrupted as by Ctrl-C, so that they close their loggers. Workers that do not end
    in time are killed. On Ctrl-C the terminal has already interrupted them, and a second interrupt
    would break their cleanup. Workers therefore get some time before they are interrupted. SIGTERM,
    after which ranks save a checkpoint, is passed on to the workers, but not to their data-loading
    processes.
    """
    try:
        yield
    except BaseException as error:
        _end_workers(trainer, is_terminated=isinstance(error, Terminated))
        raise


def _end_workers(trainer: Trainer, *, is_terminated: bool) -> None:
    import psutil  # not at the top, because every verb imports this module

    def send(processes: Iterable[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    started = []
    workers = []
    processes = getattr(trainer.strategy.launcher, "procs", None) or []
    for launched in processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(launched.pid)
            started.append(process)
            workers += [process, *process.children(recursive=True)]
    patience = _PATIENCE_S
    if is_terminated and any(isinstance(launched, subprocess.Popen) for launched in processes):
        patience = 0.0  # this process is a rank too, without which the others cannot save
    elif is_terminated:
        send(started, signal.SIGTERM)
        patience = _SAVING_S
    _, workers = psutil.wait_procs(workers, timeout=patience)
    send(workers, signal.SIGINT)
    _, workers = psutil.wait_procs(workers, timeout=_GRACE_S)
    send(workers, signal.SIGKILL)
    psutil.wait_procs(workers, timeout=_GRACE_S)


# ---- Messages held back until the command line has been checked ----------------------------------


_LOGGERS = (None, "lightning", "lightning.fabric", "lightning.pytorch")

_Held = list[tuple[logging.Handler, logging.LogRecord]]


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back Lightning's messages while a run is built and checked.

    The messages are printed afterwards. They are dropped if the run is refused, because they would
    hide the error message.
    """
    held: _Held = []
    handlers = {
        handler: functools.partial(_keep, held, handler)
        for name in _LOGGERS
        for handler in logging.getLogger(name).handlers
    }
    for handler, keep in handlers.items():
        handler.addFilter(keep)
    try:
        yield
    except Exception as error:
        if explain(error) is not None:
            held.clear()
        raise
    finally:
        for handler, keep in handlers.items():
            handler.removeFilter(keep)
        for handler, record in held:
            handler.handle(record)


def _keep(held: _Held, handler: logging.Handler, record: logging.LogRecord) -> bool:
    if record.levelno > logging.INFO:
        return True
    held.append((handler, record))
    return False
