"""Tests of the leftovers of killed saves.

The next training finishes or removes them. A save of a running process is not touched.
"""

import contextlib
import functools
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import lightning.pytorch as L
import pytest

from lightning_ptdp.checkpoint import (
    CheckpointError,
    SaveFolders,
    complete_checkpoints,
    files,
    newest_checkpoint,
    read_metadata,
)
from lightning_ptdp.checkpoint.files import discard, part_name, replacing
from lightning_ptdp.checkpoint.write_locks import WriteLock
from tests.checkpoint.every_step import fit_saving
from tests.checkpoint.interruption import UNLIMITED, Killed, attempt, save, step_of

pytestmark = pytest.mark.thorough


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _run_killed(action, at, name):
    """Run ``action`` in a process that is killed as soon as it calls ``at.name``."""

    def run():
        setattr(at, name, _die)
        action()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@contextlib.contextmanager
def _elsewhere(part):
    """Start a process that writes ``part`` and holds its lock."""
    context = multiprocessing.get_context("fork")
    taken = context.Event()

    def write():
        claim = WriteLock(part)
        claim.take()
        part.mkdir()
        taken.set()
        time.sleep(600)

    process = context.Process(target=write, daemon=True)
    process.start()
    assert taken.wait(60)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "given", [newest_checkpoint, lambda folder: folder / "latest", lambda folder: folder]
)
def test_complete_but_unrenamed_save_is_finished_on_resume(tmp_path, given):
    L.seed_everything(1, verbose=False)
    fit_saving(tmp_path, 1)
    _run_killed(
        functools.partial(fit_saving, tmp_path, 2, tmp_path / "step=1.ckpt"), files, "replace"
    )
    newest = newest_checkpoint(tmp_path)
    assert newest.name.startswith("step=2.ckpt.tmp-")
    written = read_metadata(newest).created
    fit_saving(tmp_path, 3, given(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert os.readlink(tmp_path / "latest") == "step=3.ckpt"
    assert read_metadata(tmp_path / "step=2.ckpt").created == written


@pytest.mark.parametrize(
    ("module", "name"), [("save_folders", "write_metadata"), ("save", "encode_index")]
)
def test_incomplete_save_is_removed_by_next_training(tmp_path, module, name):
    L.seed_everything(1, verbose=False)
    at = importlib.import_module(f"lightning_ptdp.checkpoint.{module}")
    _run_killed(functools.partial(fit_saving, tmp_path, 1), at, name)
    assert len(os.listdir(tmp_path)) == 2
    assert complete_checkpoints(tmp_path) == []
    (tmp_path / "step=1.ckpt.gone").mkdir()
    fit_saving(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == [
        "latest",
        "step=1.ckpt",
        "step=1.ckpt.gone",
        "step=2.ckpt",
    ]


def test_save_of_running_process_is_kept_and_its_name_refused(tmp_path):
    part = part_name(tmp_path / "a.ckpt")
    with _elsewhere(part) as writer:
        save(tmp_path / "b.ckpt", 1)
        assert part.is_dir()
        with pytest.raises(
            CheckpointError,
            match=rf"a\.ckpt is being saved by another process, {writer.pid} on .*dirpath",
        ):
            save(tmp_path / "a.ckpt", 1)
        assert sorted(os.listdir(tmp_path)) == sorted(
            ["b.ckpt", "latest", part.name, f"{part.name}.lock"]
        )
    save(tmp_path / "b.ckpt", 2)
    assert sorted(os.listdir(tmp_path)) == ["b.ckpt", "latest"]


def test_lock_of_other_machine_expires_after_two_minutes(tmp_path, monkeypatch):
    """File locks may not work across machines, and their clocks differ by less than a day."""
    save(tmp_path / "b.ckpt", 1)
    part = (tmp_path / "b.ckpt").rename(part_name(tmp_path / "a.ckpt"))
    lock = Path(f"{part}.lock")
    lock.write_text(json.dumps({"machine": "another", "host": "there", "pid": 1}))
    folders, now, clock = SaveFolders(), time.monotonic(), time.time()
    for seconds, touched, expected in (
        (0, 1, True),
        (100, 2, True),
        (200, 3, True),
        (310, 3, True),
        (330, 3, False),
    ):
        os.utime(lock, (clock + touched, clock + touched))
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        folders.tidy(tmp_path)
        assert part.exists() == expected
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "latest"]
    assert os.readlink(tmp_path / "latest") == "a.ckpt"


def test_export_killed_on_another_machine_is_removed_after_a_day(tmp_path):
    part = part_name(tmp_path / "export")
    part.mkdir()
    lock = Path(f"{part}.lock")
    lock.write_text(json.dumps({"machine": "another", "host": "there", "pid": 1}))
    for hours, is_left in ((1, True), (25, False)):
        written = time.time() - 3600 * hours
        os.utime(lock, (written, written))
        with replacing(tmp_path / "export") as new:
            new.mkdir()
        assert part.exists() == lock.exists() == is_left


def test_export_killed_between_its_renames_survives_a_save(tmp_path):
    parts = [part_name(tmp_path / "export", kind) for kind in ("old", "tmp")]
    for part in parts:
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"weights")
        (part / "config.json").write_text("{}")
    Path(f"{parts[1]}.lock").write_text("{}")
    save(tmp_path / "a.ckpt", 1)
    assert all((part / "config.json").is_file() for part in parts)


def test_other_files_named_like_leftovers_are_kept(tmp_path):
    for name in ("thesis.tmp-01", "photos.old-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "years.tex").write_text("of work")
    (tmp_path / "data.tmp-12").write_text("mine")
    save(tmp_path / "a.ckpt", 1)
    assert len(list(tmp_path.glob("*.tmp-*"))) == 2
    assert (tmp_path / "photos.old-ab" / "years.tex").is_file()


def test_backup_of_checkpoint_is_kept(tmp_path):
    for backup in ("a.ckpt.old-1", "a.ckpt.old-20261130"):
        save(tmp_path / "a.ckpt", 1)
        (tmp_path / "a.ckpt").rename(tmp_path / backup)
    for step in (2, 3):
        save(tmp_path / "a.ckpt", step)
        assert step_of(tmp_path / "a.ckpt.old-1") == step_of(tmp_path / "a.ckpt.old-20261130") == 1


def test_disk_has_all_files_before_their_folder_gets_its_name(tmp_path, monkeypatch):
    """Other libraries write some files of an export, and do not sync them."""
    synced = set()
    fsync = os.fsync

    def noted(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(tmp_path / "export") as part:
        (part / "inner").mkdir(parents=True)
        (part / "inner" / "config.json").write_text("{}")
    assert synced >= {str(part), f"{part}/inner", f"{part}/inner/config.json"}
    with replacing(tmp_path / "export.pt") as part:
        part.write_bytes(b"weights")
    assert str(part) in synced


def test_message_names_checkpoint_that_is_used_instead_of_damaged_one(tmp_path, caplog):
    L.seed_everything(1, verbose=False)
    fit_saving(tmp_path, 2)
    os.remove(tmp_path / "step=2.ckpt" / "state.json")
    with (
        caplog.at_level(logging.INFO),
        pytest.warns(UserWarning, match="Training resumes from the previous one"),
    ):
        fit_saving(tmp_path, 3, tmp_path / "step=2.ckpt")
    assert f"Restored all states from the checkpoint at {tmp_path}/step=1.ckpt" in caplog.text


def test_killed_removal_leaves_no_partial_checkpoint(tmp_path):
    save(tmp_path / "a.ckpt", 1)
    _run_killed(functools.partial(discard, tmp_path / "a.ckpt"), os, "unlink")
    assert complete_checkpoints(tmp_path) == []
    assert not (tmp_path / "a.ckpt").exists()
    SaveFolders().tidy(tmp_path)
    assert os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("behind", [False, True])
def test_killed_cleanup_is_finished_by_next_cleanup(tmp_path, behind):
    """Kill the save of an existing and of a new name at any operation, then the cleanup too."""
    for name in ("last.ckpt", "other.ckpt"):
        for first in range(1, UNLIMITED):
            made = tmp_path / f"{name} {first}"
            save(made / "last.ckpt", 1)
            action = functools.partial(save, made / name, 2)
            was_cut = attempt(action, made, first, behind, Killed())
            for number in range(1, UNLIMITED):
                folder = Path(
                    shutil.copytree(made, tmp_path / f"{name} {first} {number}", symlinks=True)
                )
                newest = step_of(newest_checkpoint(folder))
                again = attempt(
                    functools.partial(SaveFolders().tidy, folder), None, number, behind, Killed()
                )
                assert step_of(newest_checkpoint(folder)) == newest
                SaveFolders().tidy(folder)
                names = [path for path in os.listdir(folder) if not path.startswith(".latest-")]
                assert {*names} <= {"last.ckpt", name, "latest"}
                assert step_of(newest_checkpoint(folder)) == newest
                assert step_of(folder / "latest") in (1, newest)
                if not again:
                    break
            if not was_cut:
                break
