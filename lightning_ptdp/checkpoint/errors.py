"""The exceptions of this room, and how another one is told in its message."""

from __future__ import annotations

__all__ = ["CheckpointError", "MissingCheckpointError", "explain"]


class CheckpointError(ValueError):
    """A checkpoint cannot be written, is damaged, or does not fit what is asked of it; the message says which and why."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint of that name."""


def explain(error: BaseException) -> str:
    """An error in one line: ours speak for themselves, others need their type, and the error that they came from.

    (``torch.save`` on a full disk raises about positions in an archive; that the disk is full is in the error before it.)
    """
    if isinstance(error, CheckpointError):
        return str(error)
    root = error
    while (earlier := root.__cause__ or root.__context__) is not None:
        root = earlier
    text = f"{type(error).__name__}: {error}"
    return text if root is error else f"{text} (after {type(root).__name__}: {root})"
