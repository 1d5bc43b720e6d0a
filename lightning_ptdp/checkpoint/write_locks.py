"""Locks that show which process writes a checkpoint: a file beside it, locked for as long as the
writer lives.

A save that was killed leaves what it wrote under a temporary name. Whether nobody writes there any
more cannot be told from its age: a rank may wait for another one for half an hour. So rank 0,
without which no save is ever complete, keeps a file of its own locked::

    last.ckpt.tmp-0123456789ab          what is being written
    last.ckpt.tmp-0123456789ab.lock     {"machine": …, "host": …, "pid": …}

The kernel drops the lock with the process, however it ends. Between machines a lock is proof that
somebody lives, but its absence proves nothing, since some shared file systems keep locks to
themselves: there the writer also touches the file every few seconds, and is gone when somebody has
seen it unchanged for two minutes of a clock of his own."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lightning_ptdp.base.file_locks import locked, wait_for_lock
from lightning_ptdp.checkpoint import files

__all__ = ["Abandoned", "Claim", "Writer", "writer_of"]

_TOUCHED_EVERY_S = 5.0
_UNCHANGED_S = 120.0
_RECORD_S = 1.0  # in which whoever has made the file has also locked it and written into it
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The process that wrote a file of this kind; ``machine`` is another one after every start of
    it."""

    machine: str
    host: str
    pid: int


class Claim:
    """Lock that shows other processes, from ``take`` to ``release``, that this process writes
    ``part``.

    Args:
        part: A temporary name; nothing needs to be there.
    """

    def __init__(self, part: Path) -> None:
        self.part, self._file = part, files.lock_name(part)
        self._stream: IO[bytes] | None = None
        self._over = threading.Event()
        self._toucher: threading.Thread | None = None

    def take(self) -> None:
        """Make the file, and go on touching it.

        Raises:
            OSError: It cannot be made.
        """
        self._stream = open(self._file, "xb")  # noqa: SIM115
        wait_for_lock(self._stream, limit_s=_RECORD_S)  # somebody looks whether it is locked
        self._stream.write(json.dumps(vars(_this_process())).encode())
        self._stream.flush()
        self._toucher = threading.Thread(
            target=_touch, args=(self._file, self._over), name="ptdp claim", daemon=True
        )
        self._toucher.start()

    def release(self) -> None:
        """Remove the file: what there is has its name, or is gone. Does nothing without a
        ``take``."""
        self._over.set()
        if (
            self._toucher is not None and self._toucher.is_alive()
        ):  # not in a process that was forked meanwhile
            self._toucher.join()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream, suppress(OSError):
                self._file.unlink(missing_ok=True)
                fcntl.flock(stream, fcntl.LOCK_UN)  # a process that was forked meanwhile has it too


def writer_of(path: Path) -> Writer | None:
    """The living process of whose save ``path`` is a temporary name; None if it is gone, or if that
    cannot be told."""
    try:
        with open(files.lock_name(path), "r+b") as stream:
            return None if locked(stream) else _record(stream)
    except OSError:
        return None


class Abandoned:
    """Tells which writers are gone; one that looked alive is asked for again later."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float]] = {}

    @contextmanager
    def taken_over(self, path: Path) -> Iterator[bool]:
        """Yield True if the save that uses the temporary name ``path`` has ended; within the
        context no other process gets the same answer. Without a lock file it has ended, because
        that file is made first and removed last."""
        file = files.lock_name(path)
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
        except OSError:  # no locks here: only what is seen to change tells
            return self._unchanged(file, stream)
        writer = _record(stream)
        if writer is None:
            time.sleep(_RECORD_S)
            writer = _record(stream)
            if writer is None:
                return True
        return writer.machine == _this_process().machine or self._unchanged(file, stream)

    def _unchanged(self, file: Path, stream: IO[bytes]) -> bool:
        touched, now = os.fstat(stream.fileno()).st_mtime_ns, time.monotonic()
        before, since = self._seen.setdefault(file, (touched, now))
        if before != touched:
            self._seen[file] = (touched, now)
        return before == touched and now - since > _UNCHANGED_S


def _record(stream: IO[bytes]) -> Writer | None:
    stream.seek(0)
    try:
        found = json.loads(stream.read(10_000))
        return Writer(machine=str(found["machine"]), host=str(found["host"]), pid=int(found["pid"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _this_process() -> Writer:
    host = socket.gethostname()
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else f"{host} {uuid.getnode():x}"
    return Writer(machine=machine, host=host, pid=os.getpid())


def _touch(file: Path, over: threading.Event) -> None:
    while not over.wait(_TOUCHED_EVERY_S):
        try:
            os.utime(file)
        except OSError:
            return
