"""Selection of requeue checkpoints that a later checkpoint of the same run has replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from lightning_ptdp.checkpoint import CheckpointError, CheckpointMetadata, read_metadata

__all__ = ["superseded"]


def superseded(
    found: Iterable[Path],
    *,
    saved: Iterable[Path],
    own: Collection[Path],
    experiment: object | None,
) -> list[Path]:
    """Return the checkpoints of this run that are older than its newest.

    Args:
        found: Checkpoints saved for a requeue, including those of other runs in the same folder.
        saved: Other checkpoints of this run.
        own: Checkpoints that are known to belong to this run.
        experiment: Experiment named in checkpoints of this run; None if they name none.
    """
    newest = 0.0
    for path in saved:
        metadata = _metadata(path)
        newest = max(newest, 0.0 if metadata is None else metadata.created)
    left = {}
    for path in found:
        metadata = _metadata(path)
        if metadata is None:
            continue
        is_stated = experiment is not None and metadata.run.get("experiment") == experiment
        if path in own or is_stated:
            left[path] = metadata.created
    newest = max([newest, *left.values()])
    return [path for path, created in left.items() if created < newest]


def _metadata(path: Path) -> CheckpointMetadata | None:
    try:
        return read_metadata(path)
    except CheckpointError:
        return None
