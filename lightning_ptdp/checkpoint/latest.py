"""The newest complete checkpoint of a folder: how it is marked, and how it is found when the mark
or the checkpoint is damaged.

``latest`` is a link beside the checkpoints that is moved, in one step, when one has been written
whole, and that leads to a whole one at every instant, also while the one that it leads to is
replaced or removed. It is a convenience and not the truth: what counts is which folders hold a
whole ``metadata.json``, and when they say that they were written."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError, MissingCheckpointError
from lightning_ptdp.checkpoint.checkpoint_verifier import verify_checkpoint
from lightning_ptdp.checkpoint.metadata import METADATA_FILE, read_metadata

__all__ = [
    "LATEST",
    "OnDamage",
    "choose_checkpoint",
    "complete_checkpoints",
    "is_folder_of_checkpoints",
    "latest_follows",
    "latest_leaves",
    "leads_nowhere",
    "mark_latest",
    "newest_checkpoint",
    "written_at",
]

LATEST = "latest"
_TRIES = 10
OnDamage = Literal["previous", "refuse"]


def mark_latest(checkpoint: Path) -> None:
    """Point ``latest``, beside a complete checkpoint, to it. Something else of that name is left
    alone."""
    link = checkpoint.parent / LATEST
    if os.path.lexists(link) and not link.is_symlink():
        return
    try:
        any(_pointed(link, checkpoint.name) for _ in range(_TRIES))
        for cut_off in link.parent.glob(f".{LATEST}-*"):
            files.remove(cut_off)
    except OSError as error:  # a file system without links; the checkpoint itself is whole
        warnings.warn(
            f"{link} cannot be made ({error}): continue with "
            f"newest_checkpoint({str(link.parent)!r})",
            stacklevel=2,
        )


def _pointed(link: Path, name: str) -> bool:
    """Return True if ``link`` now points to ``name``.

    Another training that marks its own checkpoint may have removed the new link as a leftover.
    """
    fresh = link.with_name(f".{LATEST}-{uuid.uuid4().hex[:12]}")
    os.symlink(name, fresh)
    try:
        os.replace(fresh, link)
    except FileNotFoundError:
        return False
    return True


def latest_follows(target: Path) -> Callable[[Path], None]:
    """Return a function that moves a ``latest`` which leads to ``target``, or to the remains of a
    save of it, to a given path; any other ``latest`` stays."""
    led = _led_to(target.parent)
    if led is None or target not in (led, files.leftover_of(led)):
        return lambda _: None
    return mark_latest


def latest_leaves(checkpoint: Path) -> None:
    """Before ``checkpoint`` is removed: a ``latest`` that leads to it is moved to the newest
    complete one of the others."""
    if _led_to(checkpoint.parent) != checkpoint:
        return
    left = [other for other in complete_checkpoints(checkpoint.parent) if other != checkpoint]
    if left:
        mark_latest(left[0])
    else:
        (checkpoint.parent / LATEST).unlink(missing_ok=True)


def _led_to(folder: Path) -> Path | None:
    """Return the path to which the ``latest`` of ``folder`` leads, whether or not it exists."""
    link = folder / LATEST
    return folder / os.readlink(link) if link.is_symlink() else None


def leads_nowhere(folder: Path) -> bool:
    """Return True if ``latest`` leads to a name that no longer exists, because a rename was cut
    off."""
    led = _led_to(folder)
    return led is not None and not led.exists()


def written_at(path: Path) -> float | None:
    """When a checkpoint was written, in seconds since 1970; None if its metadata are not whole."""
    try:
        return read_metadata(path).created
    except CheckpointError:
        return None


def complete_checkpoints(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[Path]:
    """The checkpoints in a folder whose metadata is whole and whose files are there, the newest
    first.

    What an interrupted save left under a temporary name counts where it is complete: between two
    renames it is all there is.

    Args:
        folder: Where to look; need not exist.
        recursive: Look below it too, as where every run has a folder of its own.
    """
    found: list[tuple[float, Path]] = []
    for path, names, held in os.walk(folder):
        if files.kind_of(Path(path)) == "gone":
            names.clear()
        elif METADATA_FILE in held:
            names.clear()
            if (time := written_at(Path(path))) is not None:
                found.append((time, Path(path)))
        elif not recursive and Path(path) != Path(folder):
            names.clear()
    return [path for _, path in sorted(found, key=lambda entry: entry[0], reverse=True)]


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder or below it, or None: ``trainer.fit(...,
    ckpt_path=newest_checkpoint("runs"))``."""
    return next(iter(complete_checkpoints(folder, recursive=True)), None)


def choose_checkpoint(
    path: str | os.PathLike[str],
    *,
    on_damage: OnDamage = "previous",
    verify: Callable[[Path], object] = verify_checkpoint,
) -> Path:
    """The checkpoint to continue from: ``path`` if every byte of it is as it was written, else the
    one before it.

    Args:
        path: A checkpoint, the ``latest`` beside checkpoints, or a folder of checkpoints, which
            means its newest.
        on_damage: What to do about a damaged one: use the newest whole one written before it in the
            same folder, with a warning, or refuse.
        verify: Raises a CheckpointError if a checkpoint is damaged.

    Raises:
        CheckpointError: It is damaged and ``on_damage`` is "refuse", or no other is whole; a
            MissingCheckpointError if there is none.
    """
    if on_damage not in get_args(OnDamage):
        raise CheckpointError(f"on_damage={on_damage!r} must be one of {list(get_args(OnDamage))}")
    first, earlier = _candidates(Path(os.path.abspath(path)))
    try:
        verify(first)
        return first
    except CheckpointError as error:
        reason = str(error)
    others = earlier()
    kind = CheckpointError if first.exists() else MissingCheckpointError
    if on_damage == "refuse":
        raise kind(reason + (f"; the one before it is {others[0]}" if others else ""))
    for candidate in others:
        try:
            verify(candidate)
        except CheckpointError:
            continue
        warnings.warn(f"{reason}. Continuing from the one before it, {candidate}", stacklevel=2)
        return candidate
    raise kind(reason)


def _candidates(given: Path) -> tuple[Path, Callable[[], list[Path]]]:
    """The checkpoint that is meant, and how to find those that were written before it."""
    folder = given if is_folder_of_checkpoints(given) else given.parent
    if folder == given or (given.name == LATEST and _tells_nothing(given)):
        found = complete_checkpoints(folder)
        if not found:
            raise CheckpointError(f"there is no complete checkpoint in {folder}")
        return found[0], lambda: found[1:]
    first = given.resolve()

    def earlier() -> list[Path]:
        others = [
            other
            for other in complete_checkpoints(first.parent)
            if other != first and _is_older(other, first)
        ]
        if first.exists():
            return others
        left = files.leftovers(
            first
        )  # a name that is not there is a mistake, unless a save of it was cut off
        return [other for other in others if other in left]

    return first, earlier


def _tells_nothing(latest: Path) -> bool:
    """Return True if ``latest`` is no link (the file system has none, or a copy made a folder of
    it, which no save moves), leads to nothing, or leads to the temporary name of a save that was
    cut off."""
    led = _led_to(latest.parent)
    return led is None or not led.exists() or files.leftover_of(led) is not None


def is_folder_of_checkpoints(path: Path) -> bool:
    """A folder of checkpoints: not one itself, not even a torn one, which has no metadata but looks
    like one."""
    if not path.is_dir() or (path / METADATA_FILE).exists():
        return False
    return any((entry / METADATA_FILE).is_file() for entry in path.iterdir())


def _is_older(candidate: Path, than: Path) -> bool:
    """Return True if ``candidate`` was written before a damaged checkpoint, as far as the latter
    shows its time."""
    limit, time = written_at(than), written_at(candidate)
    return limit is None or (time is not None and time <= limit)
