"""Files and folders that survive a crash: written, synced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError

__all__ = [
    "EXPORT_MARK",
    "EarlySync",
    "check_apart",
    "check_replaceable",
    "discard",
    "existing_paths",
    "has_other_content",
    "kind_of",
    "leftover_of",
    "leftovers",
    "local_path",
    "lock_name",
    "open_synced",
    "part_name",
    "remove",
    "replace",
    "replacing",
    "settled",
    "sha256",
    "sync_folder",
]

EXPORT_MARK = ".lightning-ptdp"
"""Empty file in an exported folder. Only folders that have it are replaced: any other may be the
only copy of a model."""
_PART, _OLD, _GONE, _LOCK = "tmp", "old", "gone", ".lock"
_TEMPORARY = re.compile(rf"(.+)\.({_PART}|{_OLD}|{_GONE})-[0-9a-f]+(?:{re.escape(_LOCK)})?")
_SYNC_BYTES = 1 << 25


def local_path(path: str | os.PathLike[str]) -> str:
    """A path, also where it is given as ``file:///…``.

    Raises:
        CheckpointError: It is a URL of something else than a mounted file system.
    """
    text = os.fspath(path)
    protocol, found, rest = text.partition("://")
    if not found or protocol == "file":
        return rest or text
    raise CheckpointError(
        f"{text} is not on a file system that all ranks see, where checkpoints of this strategy "
        "are: use a folder that is mounted on every "
        "machine, and copy what is to be elsewhere"
    )


def sha256(content: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def open_synced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write; at the end waits until the disk has it."""
    with open(path, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


class EarlySync:
    """Sends what there is of a large file to the disk while more of it is being written: at its end
    there is little to wait for.

    Args:
        stream: The file.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._synced = stream, 0
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="sync"
        )  # starts its thread when it is asked to
        self._running: Future[None] | None = None

    def reached(self, position: int) -> None:
        """Tell that the file has ``position`` bytes.

        Raises:
            OSError: The disk did not take what was there before.
        """
        if position - self._synced < _SYNC_BYTES or (
            self._running is not None and not self._running.done()
        ):
            return
        self.wait()
        with contextlib.suppress(
            RuntimeError
        ):  # Python is ending, and starts no thread any more: the last sync does it all
            self._running = self._pool.submit(os.fsync, self._stream.fileno())
        self._synced = position

    def wait(self) -> None:
        """Wait for what runs.

        Raises:
            OSError: As :meth:`reached`.
        """
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Wait, whatever comes of it, and end the thread."""
        self._pool.shutdown()


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder (a renamed file can be lost otherwise)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_name(target: Path, kind: str = _PART) -> Path:
    """A fresh name beside ``target``: to write under, or to move what is there to."""
    return Path(f"{target}.{kind}-{uuid.uuid4().hex[:12]}")


def lock_name(path: Path) -> Path:
    """The file that is locked while the process lives whose save writes under this name."""
    return path if path.suffix == _LOCK else path.with_name(path.name + _LOCK)


def leftovers(target: Path) -> list[Path]:
    """Return the temporary names beside ``target`` of saves and removals that were cut off or still
    run, and their locks."""
    if not target.parent.is_dir():
        return []
    return sorted(entry for entry in target.parent.iterdir() if leftover_of(entry) == target)


def leftover_of(path: Path) -> Path | None:
    """Return the target of a save of which ``path`` is a temporary name; None for other names."""
    name = _TEMPORARY.fullmatch(path.name)
    return path.with_name(name[1]) if name is not None else None


def kind_of(path: Path) -> str:
    """ "tmp" for the name of what is being written, "old" of what was there before it, "gone" of
    what is being removed, however whole it still is; "" for other names."""
    name = _TEMPORARY.fullmatch(path.name)
    return name[2] if name is not None else ""


def settled(path: Path) -> Path:
    """``path``, or the name that it has by now if it was a temporary one."""
    target = leftover_of(path)
    return path if target is None or path.exists() else target


def replace(part: Path, target: Path, *, follow: Callable[[Path], object] = lambda _: None) -> None:
    """Put ``part`` in the place of ``target``; what was there is moved aside first and removed
    last.

    A crash at any point leaves the old or the new one whole, under its name or, between the two
    renames, beside it.

    Args:
        part: What is complete under its temporary name.
        target: The name that it shall have.
        follow: Is given where one of the two stands, before the other one is renamed: a link that
            is moved there always leads to one.
    """
    aside = part_name(target, _OLD) if os.path.lexists(target) else None
    try:
        if aside is not None:
            follow(part)
            try:
                os.rename(target, aside)
                follow(aside)
            except FileNotFoundError:  # another training in this folder has just removed it
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
    sync_folder(target.parent)
    if aside is not None:
        remove(aside)
    for path in leftovers(target):
        if not lock_name(path).exists():
            remove(path)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary name to write under; at the end it is put in the place of ``target``, after an
    error nothing is left of it.

    Raises:
        CheckpointError: The disk does not take it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = part_name(target)
    try:
        yield part
        replace(part, target)
    except OSError as error:
        raise CheckpointError(f"writing {target} failed: {error}") from error
    finally:
        remove(part)


def discard(path: Path) -> None:
    """Remove a folder so that at no instant a part of it stands under its name; another training
    may have done that already."""
    gone = part_name(path, _GONE)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
    remove(gone)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there and if we may: what is removed here is
    never needed again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike[str], *, marker: str, or_file: bool = False) -> None:
    """Refuse to replace a folder that is not a checkpoint, and a file unless ``or_file``.

    Raises:
        CheckpointError: ``path`` is a URL, a file, or a folder with content but without the file
            ``marker``.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is not a path of a mounted file system; checkpoints are written to folders "
            "only"
        )
    if has_other_content(Path(path), marker=marker):
        raise CheckpointError(
            f"{Path(path)} is a folder with other content and would be lost: choose another path"
        )
    if Path(path).is_file() and not or_file:
        raise CheckpointError(
            f"{Path(path)} is a file and would be lost, since a folder is made: choose another path"
        )


def check_apart(
    target: str | os.PathLike[str], read: Iterable[str | os.PathLike[str]], *, what: str = ""
) -> None:
    """Refuse to write over, into or around a file or folder that is read. Links are followed.

    Args:
        target: Path to write.
        read: Paths that are read; those that do not exist are skipped.
        what: Option that gives ``target``, for the message.

    Raises:
        CheckpointError: ``target`` is one of them, is inside of one, or contains one.
    """
    written = Path(os.path.realpath(target))
    for source in map(Path, read):
        if not os.path.lexists(source):
            continue
        found = Path(os.path.realpath(source))
        if written == found or found in written.parents or written in found.parents:
            raise CheckpointError(
                f"{what} {target} would change {source}, which is read here: choose another path".lstrip()
            )


def existing_paths(values: object) -> Iterator[Path]:
    """Yield the strings and paths in nested lists and mappings that name an existing file or
    folder."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, str | os.PathLike):
        with contextlib.suppress(ValueError):  # a text with a null character
            if os.path.lexists(values):
                yield Path(values)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from existing_paths(value)


def has_other_content(path: Path, *, marker: str) -> bool:
    """Return True if a folder has content, but not the file ``marker``."""
    return path.is_dir() and not (path / marker).is_file() and any(path.iterdir())
