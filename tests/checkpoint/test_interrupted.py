"""Saves interrupted at any file system operation lose no complete checkpoint."""

import functools
import os
import shutil
from pathlib import Path

import pytest

from lightning_ptdp.checkpoint import (
    choose_checkpoint,
    newest_checkpoint,
)
from lightning_ptdp.checkpoint.files import leftover_of
from lightning_ptdp.checkpoint.latest import latest_leaves
from tests.checkpoint.interruption import UNLIMITED, Killed, attempt, save, step_of


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    save(folder / "last.ckpt", 1)
    return folder


@pytest.mark.filterwarnings("ignore:.*interrupted save left")
@pytest.mark.parametrize(
    ("name", "behind"), [("last.ckpt", False), ("last.ckpt", True), ("other.ckpt", True)]
)
def test_save_killed_at_any_operation_keeps_complete_checkpoint(one, tmp_path, name, behind):
    for number in range(1, UNLIMITED):
        folder = Path(shutil.copytree(one, tmp_path / str(number), symlinks=True))
        was_cut = attempt(
            functools.partial(save, folder / name, 2), folder, number, behind, Killed()
        )
        newest = step_of(newest_checkpoint(folder))
        assert newest in ((1, 2) if was_cut else (2,))
        assert step_of(folder / "latest") in (1, newest)
        assert step_of(choose_checkpoint(folder / "last.ckpt")) in (1, newest)
        if leftover_of((folder / "latest").resolve()) is not None:
            assert step_of(choose_checkpoint(folder / "latest")) == newest
        save(folder / name, 3)
        assert step_of(folder / "latest") == step_of(choose_checkpoint(folder / "latest")) == 3
        assert sorted(os.listdir(folder)) == sorted({"last.ckpt", name, "latest"}), (
            "leftovers remain after the next save"
        )
        if not was_cut:
            return


@pytest.mark.filterwarnings("ignore:.*cannot be created")
@pytest.mark.parametrize("behind", [False, True])
def test_save_failing_at_any_operation_keeps_complete_checkpoint(one, tmp_path, behind):
    for number in range(1, UNLIMITED):
        folder = Path(shutil.copytree(one, tmp_path / str(number), symlinks=True))
        failed = attempt(
            functools.partial(save, folder / "last.ckpt", 2),
            None,
            number,
            behind,
            OSError("injected"),
        )
        assert step_of(folder / "last.ckpt") in (1, 2)
        assert step_of(folder / "latest") == step_of(folder / "last.ckpt")
        if not failed:
            return


@pytest.mark.parametrize("left", [["a"], []])
def test_latest_moves_off_removed_checkpoint(tmp_path, left):
    for step, name in enumerate([*left, "b"]):
        save(tmp_path / name, step)
    latest_leaves(tmp_path / "a")
    assert os.readlink(tmp_path / "latest") == "b"
    latest_leaves(tmp_path / "b")
    assert (
        [os.readlink(tmp_path / "latest")] if os.path.lexists(tmp_path / "latest") else []
    ) == left
