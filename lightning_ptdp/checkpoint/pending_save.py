"""A checkpoint that is being written: beside its name on disks, below its address elsewhere.

On a mounted file system, the folder is written under a temporary name and renamed at the end.
Object storage has no renaming. There, every save writes its files to a new folder below the
address, and ``metadata.json``, which names that folder, last::

    s3://bucket/run/last.ckpt/metadata.json                        complete with this object
    s3://bucket/run/last.ckpt/save-69289f1c-0123456789ab/…         all other files

An earlier checkpoint at the address is whole until the new one is, and is removed after it.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError, StorageError
from lightning_ptdp.checkpoint.latest import latest_follows
from lightning_ptdp.checkpoint.metadata import METADATA_FILE
from lightning_ptdp.checkpoint.remote_path import Place, RemotePath
from lightning_ptdp.checkpoint.save_folders import SaveFolders
from lightning_ptdp.checkpoint.write_locks import WriteLock

_ABANDONED_S = 86400  # more than any save takes, and than clocks differ
WriteMetadata = Callable[[Place, str], None]
"""Writes ``metadata.json`` to a folder, for files in its folder of the given name ("": itself)."""


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

    def begin(self, keeper: SaveFolders) -> None:
        """Claim the target, unless a living process saves there."""
        keeper.take(self._claim)

    def commit(self, write_metadata: WriteMetadata) -> None:
        """Complete the checkpoint, and remove the earlier one."""
        write_metadata(self.part, "")
        files.sync_folder(self.part)
        files.replace(self.part, self._target, follow=latest_follows(self._target))

    def discard(self) -> None:
        """Remove the incomplete content."""
        files.remove(self.part)

    def release(self) -> None:
        """Give the claim up."""
        self._claim.release()


class _ObjectSave:
    """A save to object storage, which has no locks: another writer is seen at the end.

    Attributes:
        part: Folder to which all ranks write.
    """

    def __init__(self, target: RemotePath, name: str) -> None:
        self._target, self.part = target, target / f"save-{name}"
        self._earlier, self._is_sent = "", False

    def begin(self, keeper: SaveFolders) -> None:
        """Note the earlier checkpoint."""
        self._earlier = self._committed()

    def commit(self, write_metadata: WriteMetadata) -> None:
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
        write_metadata(self._target, self.part.name)
        try:
            for entry in self._target.iterdir():
                if entry.name == self._earlier or _is_abandoned(entry.name):
                    entry.remove()
            if self._target.is_file():  # Lightning's single file of the same name
                self._target.unlink()
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


def _is_abandoned(name: str) -> bool:
    match = files.SAVE_NAME.fullmatch(name)
    return match is not None and int(match[1], 16) < time.time() - _ABANDONED_S
