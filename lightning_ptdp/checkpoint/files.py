"""Files and folders that survive a crash: written, synced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from lightning_ptdp.base.time_limit import in_thread
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, RemotePath, located
from lightning_ptdp.checkpoint.save_agreement import CheckpointError
from lightning_ptdp.checkpoint.write_locks import LOCK, Abandoned, WriteLock

EXPORT_MARK = ".lightning-ptdp"
"""Empty file in an exported folder.

Only folders that have it are replaced, because any other folder may be the only copy of a model.
"""
_PART, _OLD, _GONE = "tmp", "old", "gone"
# Not fewer digits: a user may call a backup "last.ckpt.old-1".
_TEMPORARY = re.compile(rf"(.+)\.({_PART}|{_OLD}|{_GONE})-[0-9a-f]{{12}}(?:{re.escape(LOCK)})?")
SPARE = ".lightning-ptdp-spare"
"""Folder of files that the next checkpoint is written over."""
_SYNC_BYTES = 1 << 25
SAVE_NAME = re.compile(r"save-([0-9a-f]{8})-[0-9a-f]+")
"""Folder of one save's files in object storage; the first number is its time in seconds."""


def local_path(path: PathLike) -> Path:
    """Return the absolute path of a file or folder, which may be given as ``file:///…``.

    Raises:
        CheckpointError: The path is the URL of something other than a mounted file system.
    """
    place = absolute(path)
    if isinstance(place, Path):
        return place
    raise CheckpointError(
        f"{place} is not on a file system that all ranks share, which is needed here. Use a "
        "folder that is mounted on every machine, and copy it to other storage afterwards"
    )


def absolute(path: PathLike) -> Place:
    """Return the place of a path or an address, independent of the working directory."""
    place = located(path)
    return Path(os.path.abspath(place)) if isinstance(place, Path) else place


def sha256(content: bytes) -> str:
    """Return the hexadecimal sha256 digest."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def open_synced(path: Place, size: int = 0) -> Iterator[IO[bytes]]:
    """Return a context with a file to write, which ends when the disk has the file.

    An object is sent at the end, from memory. If its ``size`` is known, that memory need not grow,
    which costs as much time as a tenth of a fast upload. If :func:`recycle` has kept a file of the
    same name, a local file of known ``size`` is written over it.
    """
    if isinstance(path, RemotePath):
        content = io.BytesIO(bytes(size))
        yield content
        path.write_bytes(content.getvalue())
        return
    mode = "wb"
    if size:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path.parent.parent / SPARE / path.name, path)
            mode = "rb+"
    with open(path, mode) as stream:
        yield stream
        stream.truncate()
        os.fsync(stream.fileno())


@dataclass
class EarlySync:
    """Background sync of a large file during writing, which shortens the sync at its end.

    Attributes:
        stream: The file.
    """

    stream: IO[bytes]
    _synced: int = 0
    _running: Future[None] | None = None

    def reached(self, position: int) -> None:
        """Report that the file has ``position`` bytes.

        Raises:
            OSError: The disk did not accept earlier bytes.
        """
        if (
            position - self._synced < _SYNC_BYTES
            or isinstance(self.stream, io.BytesIO)
            or (self._running is not None and not self._running.done())
        ):
            return
        self.wait()
        self._running = in_thread(partial(os.fsync, self.stream.fileno()), name="sync")
        self._synced = position

    def wait(self) -> None:
        """Wait for the current sync.

        Raises:
            OSError: As for :meth:`reached`.
        """
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Wait for the current sync, and ignore its result."""
        if self._running is not None:
            self._running.exception()


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder; both can be lost otherwise."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_number() -> str:
    """Return twelve hexadecimal digits that no other save has."""
    return uuid.uuid4().hex[:12]


def part_name(target: Path, kind: str = _PART, *, number: str = "") -> Path:
    """Return a new temporary name beside ``target``, to write to or to move ``target`` to."""
    return Path(f"{target}.{kind}-{number or new_number()}")


def leftovers(target: Path) -> list[Path]:
    """Return the temporary names beside ``target``, and their locks.

    They belong to saves and removals that were interrupted or are still running.
    """
    if not target.parent.is_dir():
        return []
    return sorted(entry for entry in target.parent.iterdir() if leftover_of(entry) == target)


def leftover_of(path: Path) -> Path | None:
    """Return the target of a save with the temporary name ``path``; None for other names."""
    match = _TEMPORARY.fullmatch(path.name)
    return path.with_name(match[1]) if match is not None else None


def kind_of(path: Path) -> str:
    """Return the kind of a temporary name, or "" for any other name.

    The kinds are "tmp" for content that is being written, "old" for content that is being replaced,
    and "gone" for content that is being removed, even if it is still complete.
    """
    match = _TEMPORARY.fullmatch(path.name)
    return match[2] if match is not None else ""


def settled(path: Path) -> Path:
    """Return ``path``, or its current name if it was a temporary name."""
    target = leftover_of(path)
    return path if target is None or path.exists() else target


def replace(part: Path, target: Path, *, follow: Callable[[Path], object] = lambda _: None) -> None:
    """Replace ``target`` by ``part``; an old folder is moved aside first and removed last.

    A crash at any point leaves the old or the new content complete: under its name or, between the
    two renames of folders, next to it. A file replaces a file at once. Leftovers of interrupted
    saves are removed.

    Args:
        part: Temporary name of the complete content.
        target: The final name.
        follow: Function that is called with the path of one complete content before the other one
            is renamed, so that a link that is moved to this path is always valid.
    """
    has_folder = part.is_dir() or (target.is_dir() and not target.is_symlink())
    aside = part_name(target, _OLD) if has_folder and os.path.lexists(target) else None
    try:
        if aside is not None:
            follow(part)
            try:
                os.rename(target, aside)
                follow(aside)
            except FileNotFoundError:  # Another training in this folder has just removed it.
                aside = None
        os.rename(part, target)
    except OSError:
        if aside is not None:
            if os.path.lexists(aside) and not os.path.lexists(target):
                follow(part)
                os.rename(aside, target)
            follow(target)
        raise
    follow(target)
    sync(target.parent)
    if aside is not None:
        remove(aside)
    abandoned = Abandoned()
    for path in leftovers(target):
        with abandoned.taken_over(path) as has_ended:
            if has_ended:
                remove(path)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Return a context with a temporary name, which replaces ``target`` at the end.

    The disk has all content before it gets its name. After an error, nothing is left of it. If
    several processes replace ``target`` at the same time, the content of one of them remains.

    Raises:
        CheckpointError: The disk does not accept it.
    """
    part = part_name(target)
    lock = WriteLock(part)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
        yield part
        for path in (part, *part.rglob("*")):
            if path.exists():  # not a link to nothing
                sync(path)
        replace(part, target)
    except OSError as error:
        raise CheckpointError(f"writing {target} failed: {error}") from error
    finally:
        remove(part)
        lock.release()


def discard(path: Place) -> None:
    """Remove a checkpoint folder such that its name never has only a part of it.

    Another training may have removed it already.
    """
    if isinstance(path, RemotePath):
        (path / "metadata.json").unlink()  # a checkpoint without it does not count
        path.remove()
        return
    gone = part_name(path, _GONE)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
    remove(gone)


def recycle(path: Path) -> None:
    """Remove a checkpoint folder, but keep its files for the next checkpoint beside it.

    In a file system in memory, allocating and freeing pages takes longer than filling them.
    """
    spare = path.parent / SPARE
    remove(spare)
    (path / "metadata.json").unlink(missing_ok=True)  # a checkpoint without it does not count
    os.rename(path, spare)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists and permissions allow it.

    Errors are ignored, because the removed content is never needed again.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def check_replaceable(path: PathLike, *, marker: str, or_file: bool = False) -> None:
    """Check that a folder to replace is a checkpoint or export; files need ``or_file``.

    Raises:
        CheckpointError: ``path`` is a file, a device, a mount point, or a folder with content but
            without the file ``marker``.
    """
    place = located(path)
    # An overlay file system may report a file of a lower layer as a mount point.
    if isinstance(place, Path) and place.is_dir() and os.path.ismount(place):
        raise CheckpointError(
            f"{place} is a mount point, which cannot be replaced. Choose a folder in it"
        )
    if has_other_content(place, marker=marker):
        raise CheckpointError(
            f"{place} is a folder with other content, which would be lost. Choose another path"
        )
    if isinstance(place, Path) and place.exists() and not (place.is_file() or place.is_dir()):
        raise CheckpointError(
            f"{place} is neither a file nor a folder, and must not be replaced. Choose another path"
        )
    if not or_file and place.is_file():
        raise CheckpointError(
            f"{place} is a file, which would be replaced by a folder. Choose another path"
        )


def check_apart(target: PathLike, read: Iterable[PathLike], *, what: str = "") -> None:
    """Check that the path to write is not, contains or is inside a path that is read.

    Links are followed.

    Args:
        target: Path to write.
        read: Paths that are read. Paths that do not exist are skipped.
        what: Option that gives ``target``, for the message.

    Raises:
        CheckpointError: ``target`` is one of these paths, is inside one, or contains one.
    """
    written = _real(target)
    for source in map(located, read):
        if isinstance(source, Path) and not os.path.lexists(source):
            continue
        resolved = _real(source)
        if written == resolved or resolved in written.parents or written in resolved.parents:
            raise CheckpointError(
                f"{what} {target} would change {source}, which is the source. Choose another path".lstrip()
            )


def _real(path: PathLike) -> PurePosixPath:
    place = located(path)
    return PurePosixPath(place.url if isinstance(place, RemotePath) else os.path.realpath(place))


def existing_paths(values: object) -> Iterator[Path]:
    """Yield the strings and paths in nested lists and mappings that name an existing path."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, str | os.PathLike):
        with contextlib.suppress(ValueError):  # The text may contain a null character.
            if os.path.lexists(values):
                yield Path(values)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from existing_paths(value)


def has_other_content(path: Place, *, marker: str) -> bool:
    """Return True if a folder has content, but not the file ``marker``.

    Interrupted saves in object storage do not count.
    """
    if isinstance(path, Path) and not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}  # of an address: one request
    return marker not in names and any(not SAVE_NAME.fullmatch(name) for name in names)
