"""The exceptions of this room, and how another one is told in its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ptdp.base.errors import PTDPError

__all__ = ["CheckpointError", "MissingCheckpointError", "explain", "reading"]


class CheckpointError(PTDPError, ValueError):
    """A checkpoint cannot be written, is damaged, or does not fit what is asked of it; the message
    says which and why."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint of that name."""


@contextmanager
def reading(file: Path, says: str = "is damaged") -> Iterator[None]:
    """Around what reads a file and compares it: what is wrong with it is a ``CheckpointError`` that
    names it, and ``says`` so."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else file
        raise CheckpointError(f"{named} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {says}: {error}") from error


def explain(error: BaseException) -> str:
    """An error in one line: ours speak for themselves, others need their type, and the error that
    they came from.

    (``torch.save`` on a full disk raises about positions in an archive; that the disk is full is in
    the error before it.)"""
    if isinstance(error, CheckpointError):
        return str(error)
    root = error
    while (earlier := root.__cause__ or root.__context__) is not None:
        root = earlier
    text = f"{type(error).__name__}: {error}"
    return text if root is error else f"{text} (after {type(root).__name__}: {root})"
