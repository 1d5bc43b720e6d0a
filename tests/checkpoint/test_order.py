"""Tests of the order of checkpoints: a checkpoint that was written later is newer.

The order depends neither on clocks nor on file times, which a copy may change.
"""

import os
import shutil
import time

import lightning.pytorch as L
import pytest
import torch

from lightning_ptdp.checkpoint import (
    SaveFolders,
    complete_checkpoints,
    newest_checkpoint,
    read_metadata,
    reshard_checkpoint,
    save_checkpoint,
)
from lightning_ptdp.cli.resume import find_newest
from tests.checkpoint.every_step import fit_saving
from tests.checkpoint.layouts import replicated

HOUR, DAY = 3600.0, 86400.0
CLOCK = time.time


def _save(path, step, folders=None):
    tensors = replicated({"w": torch.full((5,), float(step))})
    save_checkpoint(
        path, tensors=tensors, state={}, metadata={"global_step": step}, folders=folders
    )
    return path


@pytest.mark.parametrize("of_one_training", [True, False])
def test_order_ignores_clock_changes_between_saves(tmp_path, monkeypatch, of_one_training):
    folders = SaveFolders() if of_one_training else None
    for step, offset in enumerate((0.0, -HOUR, DAY, -DAY, -DAY)):
        monkeypatch.setattr(time, "time", lambda offset=offset: CLOCK() + offset)
        newest = _save(tmp_path / f"{9 - step}.ckpt", step, folders)
        assert newest_checkpoint(tmp_path) == newest
    assert [read_metadata(path).run["global_step"] for path in complete_checkpoints(tmp_path)] == [
        4,
        3,
        2,
        1,
        0,
    ]


def test_order_survives_copy_and_reshard(tmp_path):
    old, new = _save(tmp_path / "runs" / "a", 1), _save(tmp_path / "runs" / "b", 2)
    reshard_checkpoint(old, tmp_path / "runs" / "a again")
    for path in (new, *new.iterdir()):
        os.utime(path, (1, 1))
    assert (
        newest_checkpoint(shutil.copytree(tmp_path / "runs", tmp_path / "copy"))
        == tmp_path / "copy" / "b"
    )


def test_resumed_or_restarted_run_is_newer_in_any_folder(tmp_path, monkeypatch):
    """A machine whose clock is a day behind resumes in another folder.

    Then the user resumes from an earlier step, and starts again.
    """
    L.seed_everything(1, verbose=False)
    fit_saving(tmp_path / "one", 3)
    monkeypatch.setattr(time, "time", lambda: CLOCK() - DAY)
    fit_saving(tmp_path / "two", 5, newest_checkpoint(tmp_path))
    assert newest_checkpoint(tmp_path) == tmp_path / "two" / "step=5.ckpt"
    fit_saving(tmp_path / "two", 3, tmp_path / "two" / "step=4.ckpt", every_n_train_steps=2)
    trainer = fit_saving(tmp_path / "two", 2, every_n_train_steps=2)
    found = newest_checkpoint(tmp_path)
    assert found.parent == tmp_path / "two"
    assert read_metadata(found).run["global_step"] == 2
    trainer.strategy.run_facts = {"experiment": {"model": "1"}}
    last = tmp_path / "two" / "named.ckpt"
    trainer.save_checkpoint(last)
    assert find_newest(trainer, {"model": "1"}).own == last
