"""The newest complete checkpoint of a folder: the ``latest`` link, and the search for it.

``latest`` is a link beside the checkpoints. It is moved atomically when a checkpoint is complete,
and leads to a complete one at every instant, even while its checkpoint is being replaced or
removed. The link is only a convenience. The folders with an undamaged ``metadata.json``, and the
times in these files, decide which checkpoint is the newest.
"""

from __future__ import annotations

import math
import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.index import verify_checkpoint
from lightning_ptdp.checkpoint.metadata import METADATA_FILE, read_metadata, stated_metadata
from lightning_ptdp.checkpoint.remote_path import PathLike, Place, RemotePath, each, located
from lightning_ptdp.checkpoint.save_agreement import (
    CheckpointError,
    MissingCheckpointError,
    StorageError,
)

LATEST = "latest"
_TRIES = 10
OnDamage = Literal["previous", "refuse"]


def mark_latest(checkpoint: Place) -> None:
    """Point ``latest``, beside a complete checkpoint, to it.

    A ``latest`` that is not a link is kept. Object storage has no links.
    """
    if isinstance(checkpoint, RemotePath):
        return
    link = checkpoint.parent / LATEST
    if os.path.lexists(link) and not link.is_symlink():
        return
    try:
        any(_pointed(link, checkpoint.name) for _ in range(_TRIES))
        for leftover in link.parent.glob(f".{LATEST}-*"):
            files.remove(leftover)
    except OSError as error:
        # Some file systems do not support links. The checkpoint itself is complete.
        warnings.warn(
            f"{link} cannot be created ({error}). To resume, use "
            f"newest_checkpoint({str(link.parent)!r})",
            stacklevel=2,
        )


def _pointed(link: Path, name: str) -> bool:
    """Return True if ``link`` now points to ``name``.

    Another training that marks its own checkpoint may have removed the new link as a leftover.
    """
    temporary = link.with_name(f".{LATEST}-{uuid.uuid4().hex[:12]}")
    os.symlink(name, temporary)
    try:
        os.replace(temporary, link)
    except FileNotFoundError:
        return False
    return True


def latest_follows(target: Path) -> Callable[[Path], None]:
    """Return a function that moves ``latest`` to a given path, if it leads to ``target``.

    ``latest`` may also lead to a temporary name of ``target``. Any other ``latest`` is kept.
    """
    linked = _target_of(target.parent)
    if linked is None or target not in (linked, files.leftover_of(linked)):
        return lambda _: None
    return mark_latest


def latest_leaves(checkpoint: Place) -> None:
    """Move a ``latest`` that leads to ``checkpoint`` to the newest other complete checkpoint.

    Call this before ``checkpoint`` is removed.
    """
    if isinstance(checkpoint, RemotePath) or _target_of(checkpoint.parent) != checkpoint:
        return
    remaining = [path for path in complete_checkpoints(checkpoint.parent) if path != checkpoint]
    if remaining:
        mark_latest(remaining[0])
    else:
        (checkpoint.parent / LATEST).unlink(missing_ok=True)


def _target_of(folder: Path) -> Path | None:
    """Return the path to which the ``latest`` of ``folder`` leads, whether or not it exists."""
    link = folder / LATEST
    return folder / os.readlink(link) if link.is_symlink() else None


def is_dangling(folder: Path) -> bool:
    """Return True if ``latest`` leads to a missing name, because a rename was interrupted."""
    linked = _target_of(folder)
    return linked is not None and not linked.exists()


def written_at(path: Place) -> float | None:
    """Return the time at which a checkpoint was written, in seconds since 1970.

    None means that its metadata is damaged or missing.

    Raises:
        StorageError: Object storage failed.
    """
    try:
        return read_metadata(path).created
    except StorageError:
        raise
    except CheckpointError:
        return None


def complete_checkpoints(folder: PathLike, *, recursive: bool = False) -> list[Place]:
    """Return the complete checkpoints in a folder, the newest first.

    A checkpoint is complete if its metadata is undamaged and its files exist. A complete checkpoint
    under the temporary name of an interrupted save counts too, because between two renames it may
    be the only one.

    Args:
        folder: Folder to search; need not exist.
        recursive: Search subfolders too, for example if every run has its own folder.
    """
    times = checkpoint_times(folder, recursive=recursive)
    return sorted(times, key=lambda path: times[path], reverse=True)


def checkpoint_times(folder: PathLike, *, recursive: bool = False) -> dict[Place, float]:
    """Return when each complete checkpoint was written; see :func:`complete_checkpoints`."""
    times: dict[Place, float] = {}
    root = located(folder)
    if isinstance(root, RemotePath):
        names = [name.rpartition("/") for name in root.below()]
        found = [
            root / parent if parent else root
            for parent, _, name in names
            if name == METADATA_FILE and (recursive or "/" not in parent)
        ]
        written = zip(found, each(root, written_at, found), strict=True)
        return {path: time for path, time in written if time is not None}
    for path, subfolders, file_names in os.walk(folder):
        if files.kind_of(Path(path)) == "gone":
            subfolders.clear()
        elif METADATA_FILE in file_names:
            subfolders.clear()
            if (time := written_at(Path(path))) is not None:
                times[Path(path)] = time
        elif not recursive and Path(path) != Path(folder):
            subfolders.clear()
    return times


def choose_checkpoint(
    path: PathLike,
    *,
    on_damage: OnDamage = "previous",
    verify: Callable[[Place], object] = verify_checkpoint,
) -> Place:
    """Return the checkpoint to continue from: ``path`` if it is undamaged, else an older one.

    Args:
        path: A checkpoint, the ``latest`` beside checkpoints, or a folder of checkpoints, which
            means its newest one.
        on_damage: Action for a damaged checkpoint. "previous": use the newest undamaged one in
            the same folder that was written before it, with a warning. "refuse": raise an error.
        verify: Function that raises a CheckpointError if a checkpoint is damaged.

    Raises:
        CheckpointError: The checkpoint is damaged, and ``on_damage`` is "refuse" or no older one is
            undamaged. A MissingCheckpointError if the checkpoint does not exist, a StorageError if
            object storage failed.
    """
    if on_damage not in get_args(OnDamage):
        raise CheckpointError(f"on_damage={on_damage!r} must be one of {list(get_args(OnDamage))}")
    first, find_older = _candidates(files.absolute(path))
    reason = _damage(first, verify)
    if not reason:
        return first
    older = find_older()
    error_type = CheckpointError if first.exists() else MissingCheckpointError
    if on_damage == "refuse":
        raise error_type(reason + (f". The previous one is {older[0]}" if older else ""))
    for candidate in older:
        if not _damage(candidate, verify):
            warnings.warn(
                f"{reason}. Training resumes from the previous one, {candidate}", stacklevel=2
            )
            return candidate
    raise error_type(reason)


def _damage(checkpoint: Place, verify: Callable[[Place], object]) -> str:
    """Return why a checkpoint cannot be used; "" if it is undamaged.

    Raises:
        StorageError: Object storage failed.
    """
    try:
        verify(checkpoint)
    except StorageError:
        raise
    except CheckpointError as error:
        return str(error)
    return ""


def _candidates(path: Place) -> tuple[Place, Callable[[], list[Place]]]:
    """Return the requested checkpoint, and a function that returns the older ones."""
    folder = path if is_folder_of_checkpoints(path) else path.parent
    if folder == path or (path.name == LATEST and _is_stale(path)):
        checkpoints = complete_checkpoints(folder)
        if not checkpoints:
            raise CheckpointError(f"there is no complete checkpoint in {folder}")
        return checkpoints[0], lambda: checkpoints[1:]
    first = path.resolve()

    def find_older() -> list[Place]:
        older = [
            candidate
            for candidate in complete_checkpoints(first.parent)
            if candidate != first and _is_older(candidate, first)
        ]
        if isinstance(first, RemotePath) or first.exists():
            return older
        # A missing name is a mistake, unless a save under this name was interrupted.
        leftovers = files.leftovers(first)
        return [candidate for candidate in older if candidate in leftovers]

    return first, find_older


def _is_stale(latest: Place) -> bool:
    """Return True if ``latest`` does not identify a checkpoint.

    ``latest`` is not a link (the file system has none, or a copy turned it into a folder, which no
    save moves), leads to a missing path, or leads to the temporary name of an interrupted save.
    """
    linked = None if isinstance(latest, RemotePath) else _target_of(latest.parent)
    return linked is None or not linked.exists() or files.leftover_of(linked) is not None


def is_folder_of_checkpoints(path: Place) -> bool:
    """Return True for a folder of checkpoints that is not a checkpoint itself.

    A torn checkpoint, which has no metadata, is not a folder of checkpoints either.
    """
    if not path.is_dir() or (path / METADATA_FILE).exists():
        return False
    return any((entry / METADATA_FILE).is_file() for entry in path.iterdir())


def _is_older(candidate: Place, damaged: Place) -> bool:
    """Return True if ``candidate`` was written before a damaged checkpoint.

    The metadata shows the time, even if other files are damaged. Without metadata, the time of the
    newest file counts, and without files every candidate is older.
    """
    time = written_at(candidate)
    try:
        limit = stated_metadata(damaged).created
    except StorageError:
        raise
    except CheckpointError:
        if isinstance(damaged, RemotePath) or not damaged.is_dir():
            return True
        limit = max((file.stat().st_mtime for file in damaged.iterdir()), default=math.inf)
    return time is not None and time <= limit
