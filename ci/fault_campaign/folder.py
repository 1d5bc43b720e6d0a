"""Invariants of a folder of checkpoints that hold at every instant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.checkpoint import (
    CheckpointError,
    read_metadata,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.memory_folders import newest_first

__all__ = ["Standing", "leftovers", "look", "newest_here"]

_LEFTOVER = re.compile(r"\.(tmp|old|gone)-[0-9a-f]+(\.lock)?$|^\.latest-")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Content of a folder. A step is -1 if there is no such checkpoint.

    Attributes:
        newest: The newest complete checkpoint.
        newest_step: Optimizer step of that checkpoint.
        latest_step: Optimizer step of the checkpoint that ``latest`` points to.
        wrong: Violations of the invariants.
    """

    newest: Path | None = None
    newest_step: int = -1
    latest_step: int = -1
    wrong: tuple[str, ...] = ()


def look(folder: Path, before: Standing) -> Standing:
    """Read every byte of every checkpoint in ``folder``, and compare with ``before``."""
    wrong: list[str] = []
    newest, newest_step, latest_step = newest_here(folder), -1, -1
    if newest is not None:
        newest_step = _step(newest, wrong)
    latest = folder / "latest"
    if latest.is_symlink():
        latest_step = _step(latest, wrong)
    if newest_step < before.newest_step:
        wrong.append(
            f"the newest complete checkpoint is of step {newest_step}, and was of step "
            f"{before.newest_step}"
        )
    if latest_step < before.latest_step:
        wrong.append(f"latest is of step {latest_step}, and was of step {before.latest_step}")
    for path in sorted(folder.iterdir()):
        if not path.is_symlink() and not _LEFTOVER.search(path.name):
            _step(path, wrong)
    return Standing(
        newest=newest, newest_step=newest_step, latest_step=latest_step, wrong=tuple(wrong)
    )


def newest_here(folder: Path) -> Path | None:
    """Return the newest checkpoint that this node has.

    The link to snapshots is none: they are lost, or not yet copied to this node."""
    return next((path for path in map(Path, newest_first(folder)) if not path.is_symlink()), None)


def leftovers(folder: Path) -> list[str]:
    """Return the names of files that killed processes have left in ``folder``."""
    return sorted(path.name for path in folder.iterdir() if _LEFTOVER.search(path.name))


def _step(path: Path, wrong: list[str]) -> int:
    try:
        verify_checkpoint(path)
        return int(read_metadata(path).run["global_step"])
    except CheckpointError as error:
        wrong.append(f"{path.name} is not whole: {error}")
        return -1
