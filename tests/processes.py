"""Commands that run in their own session, with a time limit for all its processes.

Late processes print their stacks.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.limits import Limit, running

__all__ = ["Session", "listening", "run", "session"]

LIMIT = 240.0  # below pytest's own limit, so that the output of a hanging script is reported


class Session:
    """A command and its child processes; ``output`` is everything that they printed."""

    def __init__(self, command: Sequence[str], *, folder: Path, **env: str) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR")
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in names and not key.startswith("SLURM")
        }
        self._path = folder / f"output{len(list(folder.glob('output*.txt')))}.txt"
        # With faulthandler, SIGABRT makes a process print its stacks.
        env = {**clean, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **env}
        self.process = self._start(list(command), folder, env)

    def _start(self, command: list[str], folder: Path, env: dict[str, str]) -> Any:
        with self._path.open("w") as output:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Background processes of a shell ignore SIGINT, and their children inherit this.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._path.read_text(errors="replace")

    @property
    def alive(self) -> list[psutil.Process]:
        """Return the live processes of the session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    os.getsid(process.pid) == self.process.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def _patience(self, limit: float) -> Limit:
        return Limit(limit, lambda: [process.pid for process in self.alive])

    def wait_until(self, reached: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        """Wait until ``reached()`` is true.

        Fail if the command ends first or after ``limit`` seconds.
        """
        patience = self._patience(limit)
        while not reached():
            assert self.process.poll() is None, (
                f"exited with {self.process.returncode} before: {what}\n{self.output}"
            )
            if patience.left() < 0:
                raise AssertionError(f"not within {limit} s: {what}\n{self.stacks()}")
            time.sleep(0.05)

    def finish(self, limit: float = LIMIT) -> int:
        """Wait for all processes of the session and return the exit code."""
        patience = self._patience(limit)
        while self.process.poll() is None or self.alive:
            if patience.left() < 0:
                raise AssertionError(f"not ended within {limit} s: {self.alive}\n{self.stacks()}")
            time.sleep(0.05)
        return self.process.returncode

    def stacks(self) -> str:
        """Abort every process and return the output with the stacks."""
        for process in self.alive:
            with contextlib.suppress(psutil.Error, OSError), self._path.open("a") as output:
                output.write(
                    f"\nprocess {process.pid}, {process.status()}: "
                    f"{' '.join(process.cmdline())[:100]}\n"
                )
                output.flush()
                process.send_signal(signal.SIGABRT)
                process.wait(5)
        return self.output

    def kill(self) -> None:
        """Kill all remaining processes."""
        for process in self.alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def session(command: Sequence[str], *, folder: Path, **env: str) -> Iterator[Session]:
    """Run a command and kill its remaining processes at the end."""
    run = Session(command, folder=folder, **env)
    try:
        yield run
    finally:
        run.kill()


def run(
    command: Sequence[str], *, limit: float = LIMIT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command like ``subprocess.run``, within ``limit`` seconds (limits.py)."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    patience = Limit(limit, running)
    while True:
        try:
            output, errors = process.communicate(timeout=1)
        except subprocess.TimeoutExpired as late:
            if patience.left() > 0:
                continue
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()
            raise AssertionError(f"not ended within {limit} s: {command}") from late
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def listening(pids: Sequence[int]) -> set[str]:
    """Return the local addresses ("address:port") on which processes listen.

    IPv4 addresses that are mapped into IPv6 keep the IPv6 form.
    """
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(handle))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                raw = b"".join(
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                )
                found.add(f"{socket.inet_ntop(family, raw)}:{int(port, 16)}")
    return found
