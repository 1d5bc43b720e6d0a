"""Errors of checkpoints, and agreement of ranks, so that all of them succeed or all of them fail.

Every rank enters a save. If one rank raised and left, the others would wait in the next collective
until its time limit. Therefore every step that can fail ends with an exchange of outcomes. All
functions also work without a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_ptdp.base.errors import PTDPError, listed
from lightning_ptdp.shims.torch_distributed import is_communication_error

T = TypeVar("T")
_SHOWN = 3


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
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {says}: {error}") from error


# ---- Agreement of ranks --------------------------------------------------------------------------


def has_groups() -> bool:
    """Return True if this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def own_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in a group (None: the default group)."""
    return dist.get_rank(group) if has_groups() else 0


def is_rank_zero(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if this process writes the files that the group writes once."""
    return own_rank(group) == 0


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` of every rank of a group (None: the default group); collective."""
    if not has_groups():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_zero(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return the result of ``make`` on the group's rank 0; ``make`` must not raise."""
    values: list[Any] = [make() if is_rank_zero(group) else None]
    if has_groups():
        source = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


@contextmanager
def same_outcome(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank so that all of them raise if one does.

    The block ends with a collective, which is also a barrier.

    Args:
        doing: Action of the block, for the message: ``"saving the checkpoint last.ckpt"``.
        group: Group of all ranks that agree (None: the default group).

    Raises:
        CheckpointError: The block raised on a rank. The message is the same on all ranks and names
            those that failed. A StorageError if object storage failed on a rank.
        RuntimeError: A rank was lost in the block or afterwards (the error of torch's
            communication).
    """
    cause: BaseException | None = None
    reasons: dict[int, str] = {}
    try:
        yield
    except Exception as error:
        if is_communication_error(error) or is_communication_error(error.__cause__):
            raise  # A lost rank cannot take part in an agreement.
        cause, reasons = error, {own_rank(): _one_line(error)}
    outcomes = gather((reasons, isinstance(cause, StorageError)), group)
    all_reasons = [part for part, _ in outcomes]
    failures = {rank: reason for part in all_reasons for rank, reason in part.items()}
    if failures:
        error_type = (
            StorageError if any(by_storage for _, by_storage in outcomes) else CheckpointError
        )
        raise error_type(
            f"{doing} failed: {_describe(failures, world_size=len(all_reasons))}"
        ) from cause


def _describe(failures: dict[int, str], *, world_size: int) -> str:
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(failures.items()):
        by_reason.setdefault(reason, []).append(rank)
    if len(by_reason) == 1 and len(failures) == world_size:
        return next(iter(by_reason))
    parts = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in by_reason.items()]
    return listed(parts, _SHOWN, "; ")


def _one_line(error: BaseException) -> str:
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
