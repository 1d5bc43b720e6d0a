"""Scripts and commands in processes that are forked from the pool's server, which has imported
torch and Lightning: 6 s of imports less than ``processes.run`` and ``processes.session``."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.pool import PRELOAD, in_new_process
from tests.processes import LIMIT, Session

__all__ = ["forked_session", "run_script"]


def run_script(
    path: Path, arguments: Sequence[str], *, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as ``__main__``, within ``limit`` seconds (limits.py)."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder, name) for name in ("output", "errors"))
        part = partial(_run, [str(path), *arguments], str(output), str(errors))
        code = in_new_process(part, limit=limit)
        return subprocess.CompletedProcess(
            [str(path), *arguments], code, output.read_text(), errors.read_text()
        )


@contextlib.contextmanager
def forked_session(arguments: Sequence[str], *, folder: Path, **env: str) -> Iterator[Session]:
    """Run a script or module like ``processes.session``, and kill its processes at the end.

    Args:
        arguments: Path of the script, or name of the module, and its arguments.
        folder: Working folder.
        **env: Environment variables.
    """
    run = _ForkedSession(arguments, folder=folder, **env)
    try:
        yield run
    finally:
        run.kill()


class _ForkedSession(Session):
    """Session whose first process is forked and then ends like a Python interpreter."""

    def _start(self, command: list[str], folder: Path, env: dict[str, str]) -> Any:
        self._path.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        process = context.Process(
            target=_run_in_session, args=(command, str(folder), env, str(self._path))
        )
        process.start()
        return _Forked(process)


class _Forked:
    """A ``multiprocessing.Process`` with the interface of ``subprocess.Popen``."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid
        while self.poll() is None and os.getsid(self.pid) != self.pid:
            time.sleep(0.01)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run_in_session(arguments: list[str], folder: str, env: dict[str, str], output: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run(arguments, output, output)
    finally:  # as at the end of an interpreter, which multiprocessing leaves out
        threading._shutdown()
        atexit._run_exitfuncs()


def _run(arguments: list[str], output: str, errors: str) -> None:
    for path, stream in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    faulthandler.enable()
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
