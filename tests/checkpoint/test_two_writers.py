"""Two trainings that save to one folder and remove their outdated checkpoints."""

import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.base.time_limit import locked
from lightning_ptdp.checkpoint import (
    complete_checkpoints,
    files,
    latest,
    mark_latest,
    verify_checkpoint,
    write_locks,
)
from lightning_ptdp.checkpoint.latest import latest_leaves
from tests.checkpoint.interruption import save
from tests.conformance.toys import LitNet, Place, loader, make_trainer

LIMIT_S = 60


class Together(L.Callback):
    """Callback that keeps both trainings at the same step."""

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier

    def on_train_batch_end(self, *_):
        self._barrier.wait(LIMIT_S)


def train(folder, barrier, told):
    warnings.filterwarnings("error", message=".*latest cannot be created")
    saver = ModelCheckpoint(
        folder,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=1,
        monitor="step",
        mode="max",
        save_last=True,
    )
    try:
        trainer = make_trainer(
            Place(layout={"checkpoint_format": "folder"}),
            callbacks=[Together(barrier), saver],
            enable_checkpointing=True,
            max_steps=8,
            max_epochs=None,
        )
        trainer.fit(LitNet(), loader())
        told.put("")
    except BaseException as error:
        barrier.abort()
        told.put(f"{type(error).__name__}: {error}")


def test_two_trainings_in_one_folder_leave_valid_checkpoints(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=train, args=(tmp_path / "both", barrier, told), daemon=True)
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    outcomes = [told.get(timeout=2 * LIMIT_S) for _ in processes]
    for process in processes:
        process.join(LIMIT_S)
    for outcome in outcomes:
        remedy = "Give each training its own folder" in outcome
        # or the other training ended first
        assert not outcome or remedy or outcome.startswith("BrokenBarrierError"), outcomes
    found = complete_checkpoints(tmp_path / "both")
    assert found
    for checkpoint in found:
        verify_checkpoint(checkpoint)
    assert (tmp_path / "both" / "latest").exists()


def test_removal_tolerates_concurrent_removal(tmp_path):
    files.discard(tmp_path / "nothing")
    target = tmp_path / "step=1.ckpt"
    save(target, 1)
    mark_latest(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            latest, "complete_checkpoints", lambda folder: (folder / "latest").unlink() or []
        )
        latest_leaves(target)
    assert not (tmp_path / "latest").is_symlink()


def test_latest_is_marked_despite_removal_of_new_link(tmp_path, monkeypatch):
    target, link = tmp_path / "step=1.ckpt", latest.os.symlink
    save(target, 1)
    (tmp_path / "latest").unlink(missing_ok=True)
    taken = []

    def symlink(name, path):
        link(name, path)
        if not taken:
            taken.append(path)
            path.unlink()

    monkeypatch.setattr(latest.os, "symlink", symlink)
    mark_latest(target)
    assert (tmp_path / "latest").resolve() == target


def test_checkpoint_is_replaced_despite_concurrent_removal(tmp_path):
    target = tmp_path / "last.ckpt"
    save(target, 1)
    save(tmp_path / "new", 2)
    others = iter([target])
    files.replace(
        tmp_path / "new", target, follow=lambda _: [files.discard(path) for path in others]
    )
    verify_checkpoint(target)
    assert not files.leftovers(target)


@pytest.mark.parametrize("write", [Path.write_text, lambda part, text: part.mkdir() or text])
def test_two_writers_of_one_file_or_export_succeed(tmp_path, write):
    target = tmp_path / "target"
    with files.replacing(target) as first:
        write(first, "first")
        with files.replacing(target) as second:
            write(second, "second")
        assert first.exists()
    assert target.is_dir() or target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_killed_write_of_file_is_removed_by_next_one(tmp_path):
    killed = files.part_name(tmp_path / "target")
    killed.write_text("a part")
    write_locks.lock_name(killed).write_text("")
    with files.replacing(tmp_path / "target") as part:
        part.write_text("whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "target"]


def test_lock_under_creation_is_not_abandoned(tmp_path, monkeypatch):
    """Another process checks the lock file between its creation and its locking."""
    part = tmp_path / "step=1.ckpt.tmp-0123456789ab"
    looks, created, answers = threading.Event(), threading.Event(), []

    def sleep(_):
        looks.set()
        created.wait(LIMIT_S)

    monkeypatch.setattr(write_locks.time, "sleep", sleep)

    def look():
        with write_locks.Abandoned().taken_over(part) as answer:
            answers.append(answer)

    with open(write_locks.lock_name(part), "xb") as stream:
        other = threading.Thread(target=look)
        other.start()
        assert looks.wait(LIMIT_S)
        try:
            got = locked(stream)
        finally:
            created.set()
        other.join(LIMIT_S)
    assert got and answers == [False]
