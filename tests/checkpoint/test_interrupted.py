"""A save that is cut off at any operation of the file system: `latest` leads to a whole checkpoint, and nothing whole is lost."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    choose_checkpoint,
    mark_latest,
    newest_checkpoint,
    read_metadata,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.files import leftover_of
from lightning_ptdp.checkpoint.latest import latest_leaves
from lightning_ptdp.tensor_parallel.sharding import Sharding

OPERATIONS = ("rename", "replace", "symlink", "unlink", "rmdir")
UNLIMITED = 10_000


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Cut:
    """Fails one operation of the file system, and looks at ``latest`` around all of them.

    Args:
        patch: Undone by pytest.
        folder: Where ``latest`` is; None: it is not looked at.
        number: Which operation fails, from 1.
        behind: Whether it is done first.
        error: What is raised.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path | None, number: int, behind: bool, error: BaseException) -> None:
        self.count, self._number, self._behind, self._error, self._folder = 0, number, behind, error, folder
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
    tensors = {"model/w": (torch.full((5,), float(step)), Sharding.replicated((5,)))}
    save_checkpoint(path, tensors=tensors, state={}, metadata={"step": step})
    mark_latest(path)


def step_of(path: Path | None) -> int:
    assert path is not None
    return int(verify_checkpoint(path).run["step"])


def attempt(action: Callable[[], None], folder: Path | None, number: int, behind: bool, error: BaseException) -> bool:
    """Whether ``action`` was cut off at operation ``number``; False if it has fewer."""
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, folder, number, behind, error)
        try:
            action()
        except (Killed, CheckpointError):
            assert cut.count >= number
        return cut.count >= number


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    save(folder / "last.ckpt", 1)
    return folder


@pytest.mark.filterwarnings("ignore:.*a save was interrupted")
@pytest.mark.parametrize(("name", "behind"), [("last.ckpt", False), ("last.ckpt", True), ("other.ckpt", True)])
def test_a_save_that_is_killed_at_any_operation(one: Path, tmp_path: Path, name: str, behind: bool) -> None:
    for number in range(1, UNLIMITED):
        folder = Path(shutil.copytree(one, tmp_path / str(number), symlinks=True))
        was_cut = attempt(functools.partial(save, folder / name, 2), folder, number, behind, Killed())
        newest = step_of(newest_checkpoint(folder))
        assert newest in ((1, 2) if was_cut else (2,))
        assert step_of(folder / "latest") in (1, newest)
        assert step_of(choose_checkpoint(folder / "last.ckpt")) in (1, newest)
        if leftover_of((folder / "latest").resolve()) is not None:
            assert step_of(choose_checkpoint(folder / "latest")) == newest
        save(folder / name, 3)
        assert step_of(folder / "latest") == step_of(choose_checkpoint(folder / "latest")) == 3
        assert sorted(os.listdir(folder)) == sorted({"last.ckpt", name, "latest"}), "what was left behind is gone"
        if not was_cut:
            return


@pytest.mark.filterwarnings("ignore:.*cannot be made")
@pytest.mark.parametrize("behind", [False, True])
def test_an_operation_that_fails_leaves_a_whole_one(one: Path, tmp_path: Path, behind: bool) -> None:
    for number in range(1, UNLIMITED):
        folder = Path(shutil.copytree(one, tmp_path / str(number), symlinks=True))
        failed = attempt(functools.partial(save, folder / "last.ckpt", 2), None, number, behind, OSError("injected"))
        assert step_of(folder / "last.ckpt") in (1, 2)
        assert step_of(folder / "latest") == step_of(folder / "last.ckpt")
        if not failed:
            return


@pytest.mark.parametrize("left", [["a"], []])
def test_latest_leaves_what_is_removed(tmp_path: Path, left: list[str]) -> None:
    for step, name in enumerate([*left, "b"]):
        save(tmp_path / name, step)
    latest_leaves(tmp_path / "a")
    assert os.readlink(tmp_path / "latest") == "b"
    latest_leaves(tmp_path / "b")
    assert ([os.readlink(tmp_path / "latest")] if os.path.lexists(tmp_path / "latest") else []) == left
