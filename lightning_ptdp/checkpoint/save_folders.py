"""Checkpoint folders of a run: the newest checkpoint, the current save, and interrupted saves.

Checkpoints are ordered by ``created``. It is the time of the clock, but always later than the times
of all checkpoints in the folder, and in the folder of the checkpoint that the run continues from. A
checkpoint that is written later therefore counts as newer, even if the clock was set back or
belongs to another machine. Only between runs in different folders, neither of which continues from
the other, does the clock alone decide.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import warnings
from dataclasses import replace
from json import JSONDecodeError
from pathlib import Path

from lightning_ptdp.base.time_limit import one_at_a_time
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checksums import DATA_SUFFIX, SUMS_SUFFIX
from lightning_ptdp.checkpoint.latest import (
    checkpoint_times,
    complete_checkpoints,
    is_dangling,
    latest_follows,
    mark_latest,
    written_at,
)
from lightning_ptdp.checkpoint.metadata import (
    INDEX_FILE,
    METADATA_FILE,
    README_FILE,
    STATE_FILE,
    CheckpointMetadata,
    write_metadata,
)
from lightning_ptdp.checkpoint.remote_path import Place, RemotePath, each
from lightning_ptdp.checkpoint.save_agreement import CheckpointError, StorageError
from lightning_ptdp.checkpoint.write_locks import LOCK, Abandoned, WriteLock, lock_name, writer_of

_TURN_S = 5.0
_NAMES = (METADATA_FILE, INDEX_FILE, STATE_FILE, README_FILE)


class SaveFolders:
    """Record of a run's checkpoint folders and their newest times; used by rank 0 only."""

    def __init__(self) -> None:
        self._abandoned = Abandoned()
        self._known: set[Place] = set()
        self._lock = threading.Lock()
        self._newest = 0.0

    def __reduce__(self) -> tuple[type[SaveFolders], tuple[()]]:
        """Return the recipe of an empty record, because locks cannot be copied."""
        return type(self), ()

    def go_on_from(self, checkpoint: Place) -> None:
        """Make all later checkpoints newer than those in the folder of ``checkpoint``."""
        self._look(checkpoint.parent)

    def time_of_next(self, folder: Place) -> float:
        """Return the time of the checkpoint that is being written to ``folder``.

        The time is in seconds since 1970.
        """
        with self._lock:  # a save and a snapshot may end at the same time
            self._look(folder)
            self._newest = max(time.time(), math.nextafter(self._newest, math.inf))
            return self._newest

    def take(self, claim: WriteLock) -> None:
        """Tidy the folder, and begin to write there.

        Raises:
            CheckpointError: A living process saves under the same name.
            OSError: The folder cannot be written to.
        """
        target = files.leftover_of(claim.part)
        assert target is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        self.tidy(target.parent)
        with one_at_a_time(target.parent, limit_s=_TURN_S):
            # Claim before the search: on file systems without locks, at least one process sees the
            # other.
            claim.take()
            leftovers = [
                path for path in files.leftovers(target) if lock_name(path) != lock_name(claim.part)
            ]
            writer = next(filter(None, map(writer_of, leftovers)), None)
            if writer is not None:
                # Release the claim before the turn ends, so that the next process does not see it.
                claim.release()
        if writer is not None:
            raise CheckpointError(
                f"{target} is being saved by another process, {writer.pid} on {writer.host}. Give "
                "each training its own folder (ModelCheckpoint's dirpath), or end that process"
            )

    def tidy(self, folder: Place) -> None:
        """Finish or remove the saves in ``folder`` of processes that have ended.

        A complete save gets its final name, and the rest is removed. Content that cannot be changed
        is skipped. In object storage, the next save to an address does this.
        """
        if isinstance(folder, RemotePath) or not folder.is_dir():
            return
        by_target: dict[Path, list[Path]] = {}
        for entry in sorted(folder.iterdir()):
            target = files.leftover_of(entry)
            if target is not None:
                by_target.setdefault(target, []).append(entry)
        for target, paths in by_target.items():
            locks = {lock_name(entry) for entry in paths}
            entries = [entry for entry in paths if _is_of_a_save(entry)]
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                if all(stack.enter_context(self._abandoned.taken_over(lock)) for lock in locks):
                    _settle(target, entries)
        if is_dangling(folder) and (complete := complete_checkpoints(folder)):
            mark_latest(complete[0])

    def _look(self, folder: Place) -> None:
        if folder not in self._known:
            self._known.add(folder)
            self._newest = max([self._newest, *checkpoint_times(folder).values()])


def _settle(target: Path, entries: list[Path]) -> None:
    """Give the newest complete checkpoint its final name, and remove the other entries.

    An existing checkpoint of that name is kept if it is newer.
    """
    target_time = written_at(target)
    kinds = ("tmp", "old") if target_time is None else ("tmp",)
    times = {
        path: time
        for path in entries
        if files.kind_of(path) in kinds and (time := written_at(path)) is not None
    }
    newest = max(times, key=lambda path: times[path], default=None)
    if (
        newest is not None
        and (target_time is None or times[newest] > target_time)
        and not files.has_other_content(target, marker=METADATA_FILE)
    ):
        files.replace(newest, target, follow=latest_follows(target))
        if complete_checkpoints(target.parent)[:1] == [target]:
            mark_latest(target)
    if written_at(target) is not None:
        latest_follows(target)(target)
    for path in sorted(entries, key=lambda path: path.name.endswith(".lock")):
        files.remove(path)


def _is_of_a_save(entry: Path) -> bool:
    """Return True if a save made this entry, not an export or a user who chose such a name."""
    if entry.suffix == LOCK:
        part = entry.with_suffix("")
        return not os.path.lexists(part) or _is_of_a_save(part)
    if not entry.is_dir() or entry.is_symlink():
        return False
    return all(
        name in _NAMES or name.endswith((DATA_SUFFIX, SUMS_SUFFIX)) for name in os.listdir(entry)
    )


# ---- A checkpoint that is being written: beside its name on disks, below its address elsewhere ----
#
# On a mounted file system, the folder is written under a temporary name and renamed at the end.
# Object storage has no renaming. There, every save writes its files to a new folder below the
# address, and ``metadata.json``, which names that folder, last::
#
#     s3://bucket/run/last.ckpt/metadata.json                        complete with this object
#     s3://bucket/run/last.ckpt/save-69289f1c-0123456789ab/…         all other files
#
# An earlier checkpoint at the address is complete until the new one is, and is removed after it.


_ABANDONED_S = 86400  # longer than any save, and than any difference between clocks


def new_save_name() -> str:
    """Return the name of a new save: the time, which shows that a save was abandoned, and a number."""
    return f"{int(time.time()):08x}-{files.new_number()}"


class _RenamedSave:
    """A save to a mounted file system.

    Attributes:
        part: Folder to which all ranks write.
    """

    def __init__(self, target: Path, number: str) -> None:
        self.part = files.part_name(target, number=number)
        self._target = target
        self._claim = WriteLock(self.part)

    def begin(self, folders: SaveFolders) -> None:
        """Claim the target, unless a living process saves there."""
        folders.take(self._claim)

    def commit(self, metadata: CheckpointMetadata) -> None:
        """Complete the checkpoint, and remove the earlier one."""
        write_metadata(self.part, metadata)
        files.sync(self.part)
        files.replace(self.part, self._target, follow=latest_follows(self._target))

    def discard(self) -> None:
        """Remove the incomplete content."""
        files.remove(self.part)

    def release(self) -> None:
        """Release the claim."""
        self._claim.release()


class _ObjectSave:
    """A save to object storage, which has no locks: another writer is seen at the end.

    Attributes:
        part: Folder to which all ranks write.
    """

    def __init__(self, target: RemotePath, name: str) -> None:
        self._target, self.part = target, target / f"save-{name}"
        self._earlier, self._is_sent = "", False

    def begin(self, folders: SaveFolders) -> None:
        """Note the earlier checkpoint."""
        self._earlier = self._committed()

    def commit(self, metadata: CheckpointMetadata) -> None:
        """Complete the checkpoint, and remove the earlier one.

        Raises:
            CheckpointError: Another process has saved there meanwhile.
        """
        if self._committed() != self._earlier:
            raise CheckpointError(
                f"{self._target} was saved by another process at the same time. Give each "
                "training its own folder (ModelCheckpoint's dirpath), or end that process"
            )
        self._is_sent = True
        write_metadata(self._target, replace(metadata, folder=self.part.name))
        try:
            each(
                self._target,
                lambda remove: remove(),
                [self._remove_earlier_saves, self._remove_single_file],
            )
        except StorageError as error:
            warnings.warn(f"the earlier checkpoint was not removed: {error}", stacklevel=2)

    def discard(self) -> None:
        """Remove the incomplete content.

        If sending ``metadata.json`` has failed, it may have arrived, or arrive later. Then both
        saves are kept.
        """
        if not self._is_sent:
            with contextlib.suppress(StorageError):  # the error of the save says more
                self.part.remove()

    def release(self) -> None:
        """Do nothing: there is no lock."""

    def _remove_earlier_saves(self) -> None:
        for entry in self._target.iterdir():
            if entry.name == self._earlier or _is_old_save(entry.name):
                entry.remove()

    def _remove_single_file(self) -> None:
        """Remove Lightning's single file of the same name."""
        if self._target.is_file():
            self._target.unlink()

    def _committed(self) -> str:
        """Return the folder of the checkpoint at the address; "" without a readable one."""
        with contextlib.suppress(
            FileNotFoundError, JSONDecodeError, UnicodeDecodeError, AttributeError
        ):
            content = json.loads((self._target / METADATA_FILE).read_bytes())
            return str(content.get("folder", ""))
        return ""


PendingSave = _RenamedSave | _ObjectSave
"""One save. Rank 0 alone calls its methods; all ranks write to ``part``."""


def pending_save(target: Place, name: str) -> PendingSave:
    """Return a save to ``target`` with the name ``new_save_name()`` of rank 0."""
    if isinstance(target, Path):
        return _RenamedSave(target, name.rpartition("-")[2])
    return _ObjectSave(target, name)


def _is_old_save(name: str) -> bool:
    match = files.SAVE_NAME.fullmatch(name)
    return match is not None and int(match[1], 16) < time.time() - _ABANDONED_S
