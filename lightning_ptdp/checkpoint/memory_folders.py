"""Checkpoints in the memory of a node, and the link from a run's folder to them.

The snapshots of one run are in ``/dev/shm``, and a link beside the run's checkpoints leads to
them::

    runs/checkpoints/
      last.ckpt/            a checkpoint on the disk
      memory -> /dev/shm/lightning-ptdp-0/3f2a9c…/
                  step-17/  a checkpoint of the same format
                  link      the path of the link

The link is on the disk that all nodes share. Its time is that of the newest snapshot, so that a
node without snapshots also knows whether they are newer than the checkpoints on the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.base.time_limit import locked, one_at_a_time, wait_for_lock
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.latest import checkpoint_times, written_at
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, is_url
from lightning_ptdp.checkpoint.save_agreement import CheckpointError

LINK = "memory"
_ROOT = Path("/dev/shm")
_BACK = "link"
_TURN_S = 10.0
_TEST_S = 1.0
_SNAPSHOT = re.compile(r"step-(\d+)")


@dataclass
class MemoryFolder:
    """Folder of one run's snapshots on this node.

    Attributes:
        link: Path of the link to it, in a folder that all nodes share.
        path: The folder, the same on every node.
    """

    link: Path
    path: Path

    @classmethod
    def new(cls, folder: Path) -> MemoryFolder:
        """Return a folder with a new name for a run that saves to ``folder``."""
        return cls(Path(os.path.abspath(folder)) / LINK, _home() / uuid.uuid4().hex)

    @classmethod
    def of(cls, path: Path) -> MemoryFolder:
        """Return the folder that contains a snapshot, or that a link leads to."""
        target = _followed(path)
        place = next(one for one in (target, *target.parents) if one.parent == _home())
        back = place / _BACK
        if back.is_file():
            return cls(Path(back.read_text(encoding="utf-8")), place)
        return cls(Path(os.path.abspath(path)), place)

    def create(self) -> None:
        """Create the folder, which only this user can read, and lock it until the process ends.

        Folders that no link leads to, and whose process has ended, are removed.

        Raises:
            CheckpointError: Another user owns the place.
        """
        _home().mkdir(mode=0o700, exist_ok=True)
        state = os.lstat(_home())
        if state.st_uid != os.getuid() or _home().is_symlink():
            raise CheckpointError(f"{_home()} belongs to another user. Remove it")
        # To another process, a folder without a lock looks abandoned.
        with one_at_a_time(_home(), limit_s=_TURN_S):
            for other in _home().iterdir():
                if files.kind_of(other) == "gone" or _is_abandoned(other):
                    files.discard(other)
            self.path.mkdir(exist_ok=True)
            (self.path / _BACK).write_text(str(self.link), encoding="utf-8")
            self._lock = open(self.path / _BACK, "rb")  # noqa: SIM115 - the lock lasts as long
            # ``check_memory`` may be testing it for a moment.
            wait_for_lock(self._lock, limit_s=_TEST_S)

    def publish(self, snapshot: Path, *, linked: bool) -> None:
        """Make ``snapshot``, which is complete, the only one.

        Args:
            snapshot: A checkpoint in this folder.
            linked: Whether this process moves the link; one of all nodes does.
        """
        for older in self.path.iterdir():
            if _SNAPSHOT.fullmatch(older.name) and older != snapshot:
                files.recycle(older)
        if not linked:
            return
        link = self.link
        if not self._is_linked():
            link.parent.mkdir(parents=True, exist_ok=True)
            for leftover in files.leftovers(link):  # of a process that was killed here
                files.remove(leftover)
            link = files.part_name(link)
            os.symlink(self.path, link)
        if (written := written_at(snapshot)) is not None:
            # Set the time before the link gets its name. ``written`` is later than the times of the
            # checkpoints on the disk, but the current time may not be.
            os.utime(link, (written, written), follow_symlinks=False)
        if link != self.link:
            os.replace(link, self.link)

    def trim(self) -> None:
        """Release memory that only the next snapshot would use."""
        files.remove(self.path / files.SPARE)

    def remove(self, *, linked: bool) -> None:
        """Remove the snapshots on this node, and with ``linked`` the link to them."""
        if linked and self._is_linked():
            files.remove(self.link)
        files.discard(self.path)  # if the process is killed here, the name shows it

    def _is_linked(self) -> bool:
        return self.link.is_symlink() and os.readlink(self.link) == str(self.path)

    def steps(self) -> dict[str, int]:
        """Return the names of the complete snapshots on this node, and their optimizer steps."""
        return {path.name: _step_of(path) for path in checkpoint_times(self.path)}


def in_memory(path: PathLike) -> bool:
    """Return True for a snapshot, a folder of snapshots, or a link to one, even if it is lost."""
    return not is_url(path) and _home() in _followed(path).parents


def newest_first(folder: PathLike) -> list[Place]:
    """Return the complete checkpoints below a folder, in memory and on the disk, newest first.

    The link to snapshots that this node does not have is one of them. Snapshots have the time of
    the link, because the clocks of nodes differ.
    """
    times = checkpoint_times(folder, recursive=True)
    for parent, folders, names in os.walk(folder):
        link = Path(parent) / LINK
        if LINK not in (*folders, *names) or not link.is_symlink() or not in_memory(link):
            continue
        snapshots = checkpoint_times(os.readlink(link)) or [link]
        times |= dict.fromkeys(snapshots, os.lstat(link).st_mtime)
    return sorted(times, key=lambda path: (times[path], _step_of(path)), reverse=True)


def newest_checkpoint(folder: PathLike) -> Place | None:
    """Return the newest complete checkpoint in a folder or its subfolders, or None.

    With ``snapshot_every_n_steps`` it may be in the memory of the nodes.

    Example: ``trainer.fit(..., ckpt_path=newest_checkpoint("runs"))``.
    """
    return next(iter(newest_first(folder)), None)


def check_memory(num_bytes: int) -> None:
    """Check that two snapshots of at least ``num_bytes`` fit into the memory folder.

    Raises:
        ValueError: They do not.
    """
    for other in _home().glob("*"):
        if _has_ended(other):
            files.remove(other / files.SPARE)
    free = shutil.disk_usage(_ROOT).free if _ROOT.is_dir() else 0
    if 2 * num_bytes > free:
        raise ValueError(
            f"snapshot_every_n_steps needs room for two snapshots in {_ROOT}, at least "
            f"{2 * num_bytes / 1e6:.1f} MB, but {free / 1e6:.1f} MB are free. Enlarge it (mount -o "
            "remount,size=…), remove what is left there, or leave snapshots out"
        )


def _step_of(path: Place) -> int:
    """Return the optimizer step of a snapshot, and 0 for other paths."""
    found = _SNAPSHOT.match(path.name)
    return int(found[1]) if found and in_memory(str(path)) else 0


def _followed(path: PathLike) -> Path:
    return Path(os.readlink(path) if os.path.islink(path) else os.path.abspath(path))


def _is_abandoned(folder: Path) -> bool:
    """Return True if no link leads to a folder and no process writes to it."""
    if not _has_ended(folder):
        return False
    link = Path((folder / _BACK).read_text(encoding="utf-8"))
    # Another container may share the memory, but not the disk.
    return link.parent.is_dir() and not MemoryFolder(link, folder)._is_linked()


def _has_ended(folder: Path) -> bool:
    """Return True if the process that wrote to a folder has ended."""
    with contextlib.suppress(OSError), open(folder / _BACK, "rb") as stream:
        return locked(stream)
    return False


def _home() -> Path:
    return _ROOT / f"lightning-ptdp-{os.getuid()}"
