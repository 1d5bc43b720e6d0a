"""State of the folders to which a training saves: the newest checkpoint, and the remains of saves
that were cut off.

Checkpoints are ordered by ``created``. It is the clock's time, but always later than that of every
checkpoint that was in the folder, or
in the folder of the one that training goes on from: so the one that was written later counts as
newer although the clock was set back, or is that of another machine. Only between trainings in
different folders, of which none goes on from the other, the clock alone decides."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from lightning_ptdp.base.file_locks import one_at_a_time
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError
from lightning_ptdp.checkpoint.checksums import DATA_SUFFIX, SUMS_SUFFIX
from lightning_ptdp.checkpoint.latest import (
    complete_checkpoints,
    latest_follows,
    leads_nowhere,
    mark_latest,
    written_at,
)
from lightning_ptdp.checkpoint.metadata import (
    INDEX_FILE,
    METADATA_FILE,
    README_FILE,
    STATE_FILE,
)
from lightning_ptdp.checkpoint.write_locks import Abandoned, Claim, writer_of

__all__ = ["Keeper"]

_TURN_S = 5.0
_NAMES = (METADATA_FILE, INDEX_FILE, STATE_FILE, README_FILE)


class Keeper:
    """Used by rank 0 alone."""

    def __init__(self) -> None:
        self._abandoned = Abandoned()
        self._known: set[Path] = set()
        self._newest = 0.0

    def go_on_from(self, checkpoint: Path) -> None:
        """Make everything that is saved from now on newer than what is beside ``checkpoint``."""
        self._look(checkpoint.parent)

    def time_of_next(self, folder: Path) -> float:
        """When the checkpoint that is being written to ``folder`` counts as written, in seconds
        since 1970."""
        self._look(folder)
        self._newest = max(time.time(), math.nextafter(self._newest, math.inf))
        return self._newest

    def take(self, claim: Claim) -> None:
        """Tidy the folder, and begin to write there.

        Raises:
            CheckpointError: A living process saves under the same name.
            OSError: Nothing can be written.
        """
        target = files.leftover_of(claim.part)
        assert target is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        self.tidy(target.parent)
        with one_at_a_time(target.parent, limit_s=_TURN_S):
            # before looking around: where there are no turns, at least one sees the other
            claim.take()
            others = [
                path
                for path in files.leftovers(target)
                if files.lock_name(path) != files.lock_name(claim.part)
            ]
            writer = next(filter(None, map(writer_of, others)), None)
            if writer is not None:
                # in this turn, so that the next in line does not see who has given up
                claim.release()
        if writer is not None:
            raise CheckpointError(
                f"{target} is being saved by another process, {writer.pid} on {writer.host}: give "
                "each training a folder of its own "
                "(ModelCheckpoint's dirpath), or end that one"
            )

    def tidy(self, folder: Path) -> None:
        """Finish the complete saves in ``folder`` whose process is gone before they had their name,
        and remove what else such processes left. What cannot be changed is left as it is."""
        if not folder.is_dir():
            return
        found: dict[Path, list[Path]] = {}
        for entry in sorted(folder.iterdir()):
            target = files.leftover_of(entry)
            if target is not None:
                found.setdefault(target, []).append(entry)
        for target, names in found.items():
            locks = {files.lock_name(entry) for entry in names}
            entries = (
                names
                if locks & {*names}
                else [entry for entry in names if _looks_like_a_checkpoint(entry)]
            )
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                if all(stack.enter_context(self._abandoned.taken_over(lock)) for lock in locks):
                    _settle(target, entries)
        if leads_nowhere(folder) and (complete := complete_checkpoints(folder)):
            mark_latest(complete[0])

    def _look(self, folder: Path) -> None:
        if folder not in self._known:
            self._known.add(folder)
            self._newest = max(
                [
                    self._newest,
                    *(written_at(path) or 0.0 for path in complete_checkpoints(folder)[:1]),
                ]
            )


def _settle(target: Path, entries: list[Path]) -> None:
    """Give the newest whole one its name, unless what has it is newer; remove the others."""
    there = written_at(target)
    kinds = ("tmp", "old") if there is None else ("tmp",)
    whole = {
        path: time
        for path in entries
        if files.kind_of(path) in kinds and (time := written_at(path)) is not None
    }
    newest = max(whole, key=lambda path: whole[path], default=None)
    if (
        newest is not None
        and (there is None or whole[newest] > there)
        and not files.has_other_content(target, marker=METADATA_FILE)
    ):
        files.replace(newest, target, follow=latest_follows(target))
        if complete_checkpoints(target.parent)[:1] == [target]:
            mark_latest(target)
    if written_at(target) is not None:
        latest_follows(target)(target)
    for path in sorted(entries, key=lambda path: path.name.endswith(".lock")):
        files.remove(path)


def _looks_like_a_checkpoint(entry: Path) -> bool:
    """Return True if a save made this entry, and not a user who chose such a name."""
    if not entry.is_dir() or entry.is_symlink():
        return False
    return all(
        name in _NAMES or name.endswith((DATA_SUFFIX, SUMS_SUFFIX)) for name in os.listdir(entry)
    )
