"""Exceptions of this package, and the description of other exceptions in their messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ptdp.base.errors import PTDPError


class CheckpointError(PTDPError, ValueError):
    """Error of a checkpoint that cannot be written, is damaged, or does not fit the request.

    The message says which, and why.
    """


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Error of a checkpoint that does not exist."""


class StorageError(CheckpointError):
    """Error of object storage, which says nothing about the checkpoints there."""


@contextmanager
def reading(file: os.PathLike[str], says: str = "is damaged") -> Iterator[None]:
    """Return a context that turns errors of reading a file into a ``CheckpointError``.

    Args:
        file: The file that the message names.
        says: Words that describe the file if its content is wrong.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else file
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {says}: {error}") from error


def explain(error: BaseException) -> str:
    """Return an error as one line of text.

    A ``CheckpointError`` is its message. Any other error has its type, and the error at the root of
    its chain: on a full disk, ``torch.save`` raises an error about positions in an archive, and
    only the error before it says that the disk is full.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    text = f"{type(error).__name__}: {error}"
    return text if root is error else f"{text} (after {type(root).__name__}: {root})"
