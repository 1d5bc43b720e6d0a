"""Saves that are interrupted between two file system operations."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    mark_latest,
    read_metadata,
    verify_checkpoint,
)
from tests.checkpoint import layouts

OPERATIONS = ("rename", "replace", "symlink", "unlink", "rmdir")


UNLIMITED = 10_000


class Killed(BaseException):
    """Stand-in for SIGKILL, which no handler catches."""


class Cut:
    """Fails one file system operation and checks ``latest`` before and after each of them.

    Args:
        patch: Monkeypatch that pytest undoes.
        folder: Folder of ``latest``. None skips the check.
        number: Number of the operation that fails, from 1.
        behind: True to carry out the operation before it fails.
        error: Exception to raise.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path | None,
        number: int,
        behind: bool,
        error: BaseException,
    ) -> None:
        self.count, self._number, self._behind = 0, number, behind
        self._error, self._folder = error, folder
        for name in OPERATIONS:
            patch.setattr(os, name, self._cut(getattr(os, name)))

    def _cut(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def cut(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            fails = self.count == self._number
            self._look()
            if fails and not self._behind:
                raise self._error
            result = operation(*args, **kwargs)
            self._look()
            if fails:
                raise self._error
            return result

        return cut

    def _look(self) -> None:
        if self._folder is not None:
            assert read_metadata(self._folder / "latest")


def save(path: Path, step: int) -> None:
    layouts.save(path, {"w": torch.full((5,), float(step))}, metadata={"step": step})
    mark_latest(path)


def step_of(path: Path | None) -> int:
    assert path is not None
    return int(verify_checkpoint(path).run["step"])


def attempt(
    action: Callable[[], None], folder: Path | None, number: int, behind: bool, error: BaseException
) -> bool:
    """Interrupt ``action`` at operation ``number``; return False if it has fewer operations."""
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, folder, number, behind, error)
        try:
            action()
        except (Killed, CheckpointError):
            assert cut.count >= number
        return cut.count >= number
