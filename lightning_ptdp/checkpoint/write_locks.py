"""Locks that identify the process that writes a checkpoint.

A killed save leaves its content under a temporary name. The age of this content does not show
whether its writer has ended, because a rank may wait half an hour for another one. Therefore rank
0, which completes every save, keeps a file locked while it lives::

    last.ckpt.tmp-0123456789ab          what is being written
    last.ckpt.tmp-0123456789ab.lock     {"machine": …, "host": …, "pid": …}

The kernel drops the lock at the end of the process, even after a crash. Between machines, a lock
proves that the writer lives, but a missing lock proves nothing, because some shared file systems do
not share locks. For such file systems, the writer also touches the file every few seconds. The
writer counts as gone if another process, by its own clock, sees the file unchanged for two minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lightning_ptdp.base.time_limit import locked, wait_for_lock

LOCK = ".lock"
_TOUCHED_EVERY_S = 5.0
_UNCHANGED_S = 120.0
_ABANDONED_S = 86400.0  # longer than any difference between two machines' clocks
_RECORD_S = 1.0  # time in which the process that created the file has locked and filled it
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The process that wrote a lock file; ``machine`` changes with every start of the machine."""

    machine: str
    host: str
    pid: int


def lock_name(path: Path) -> Path:
    """Return the file that a process locks while it saves under this temporary name."""
    return path if path.suffix == LOCK else path.with_name(path.name + LOCK)


class WriteLock:
    """Lock that shows other processes that this one writes ``part``.

    It is held from ``take`` to ``release``.

    Args:
        part: A temporary name, which need not exist.
    """

    def __init__(self, part: Path) -> None:
        self.part, self._file = part, lock_name(part)
        self._stream: IO[bytes] | None = None
        self._over = threading.Event()
        self._toucher: threading.Thread | None = None

    def take(self) -> None:
        """Create the lock file, and keep touching it.

        Raises:
            OSError: The file cannot be created.
        """
        self._stream = open(self._file, "xb")  # noqa: SIM115
        wait_for_lock(self._stream, limit_s=_RECORD_S)  # Another process may be testing the lock.
        self._stream.write(json.dumps(vars(_this_process())).encode())
        self._stream.flush()
        self._toucher = threading.Thread(
            target=_touch, args=(self._file, self._over), name="ptdp claim", daemon=True
        )
        self._toucher.start()

    def release(self) -> None:
        """Remove the lock file, once ``part`` has its final name or is removed.

        Without a ``take``, the call does nothing.
        """
        self._over.set()
        # The thread is not alive in a process that was forked meanwhile.
        if self._toucher is not None and self._toucher.is_alive():
            self._toucher.join()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream, suppress(OSError):
                self._file.unlink(missing_ok=True)
                # A process that was forked meanwhile holds the lock too.
                fcntl.flock(stream, fcntl.LOCK_UN)


def writer_of(path: Path) -> LockHolder | None:
    """Return the living process whose save uses the temporary name ``path``.

    None means that the process has ended, or that its state is unknown.
    """
    try:
        with open(lock_name(path), "r+b") as stream:
            return None if locked(stream) else _record(stream)
    except OSError:
        return None


@dataclass
class Abandoned:
    """Search for writers that have ended.

    A writer that looked alive can be checked again later.
    """

    _seen: dict[Path, tuple[int, float]] = field(default_factory=dict)

    @contextmanager
    def taken_over(self, path: Path) -> Iterator[bool]:
        """Yield True if the save that uses the temporary name ``path`` has ended.

        Within the context, no other process gets the same answer. A save without a lock file has
        ended, because that file is created first and removed last.
        """
        file = lock_name(path)
        try:
            stream = open(file, "r+b")  # noqa: SIM115
        except FileNotFoundError:
            yield True
            return
        except OSError:
            yield False
            return
        with stream:
            yield self._is_abandoned(file, stream)

    def _is_abandoned(self, file: Path, stream: IO[bytes]) -> bool:
        try:
            if not locked(stream):
                return False
        except OSError:
            # On a file system without locks, only the file's changes show that the writer lives.
            return self._unchanged(file, stream)
        writer = _record(stream)
        if writer is None:
            fcntl.flock(stream, fcntl.LOCK_UN)  # The process that created the file may wait for it.
            time.sleep(_RECORD_S)
            if not locked(stream):
                return False
            writer = _record(stream)
            if writer is None:
                return True
        return writer.machine == _this_process().machine or self._unchanged(file, stream)

    def _unchanged(self, file: Path, stream: IO[bytes]) -> bool:
        touched, now = os.fstat(stream.fileno()).st_mtime_ns, time.monotonic()
        before, since = self._seen.setdefault(file, (touched, now))
        if before != touched:
            self._seen[file] = (touched, now)
        if before != touched:
            return False
        return now - since > _UNCHANGED_S or time.time() - touched / 1e9 > _ABANDONED_S


def _record(stream: IO[bytes]) -> LockHolder | None:
    stream.seek(0)
    try:
        fields = json.loads(stream.read(10_000))
        return LockHolder(
            machine=str(fields["machine"]), host=str(fields["host"]), pid=int(fields["pid"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _this_process() -> LockHolder:
    host = socket.gethostname()
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else f"{host} {uuid.getnode():x}"
    return LockHolder(machine=machine, host=host, pid=os.getpid())


def _touch(file: Path, over: threading.Event) -> None:
    while not over.wait(_TOUCHED_EVERY_S):
        try:
            os.utime(file)
        except OSError:
            return
