"""Tests of the leftovers of killed saves.

The next training finishes or removes them. A save that a living process is writing is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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
from lightning_ptdp.checkpoint.files import discard, part_name
from lightning_ptdp.checkpoint.write_locks import WriteLock
from tests.checkpoint.every_step import fit_saving
from tests.checkpoint.interruption import UNLIMITED, Killed, attempt, save, step_of

pytestmark = pytest.mark.thorough


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_killed(action: Callable[[], object], at: Any, name: str) -> None:
    """Run ``action`` in a process that is killed as soon as it calls ``at.name``."""

    def run() -> None:
        setattr(at, name, _die)
        action()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@contextlib.contextmanager
def _elsewhere(part: Path) -> Iterator[BaseProcess]:
    """A living process that writes ``part``."""
    context = multiprocessing.get_context("fork")
    taken = context.Event()

    def write() -> None:
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
def test_a_save_that_was_complete_is_finished_before_training_goes_on_from_it(
    tmp_path: Path, given: Callable[[Path], Path]
) -> None:
    L.seed_everything(1, verbose=False)
    fit_saving(tmp_path, 1)
    _run_killed(
        functools.partial(fit_saving, tmp_path, 2, tmp_path / "step=1.ckpt"), files, "replace"
    )
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name.startswith("step=2.ckpt.tmp-")
    written = read_metadata(newest).created
    fit_saving(tmp_path, 3, given(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert os.readlink(tmp_path / "latest") == "step=3.ckpt"
    assert read_metadata(tmp_path / "step=2.ckpt").created == written


@pytest.mark.parametrize(("name", "last"), [("write_metadata", 2), ("write_index", 2)])
def test_a_torn_save_is_gone_after_the_next_training_also_one_from_the_beginning(
    tmp_path: Path, name: str, last: int
) -> None:
    from lightning_ptdp.checkpoint import save as save_module

    L.seed_everything(1, verbose=False)
    _run_killed(functools.partial(fit_saving, tmp_path, 1), save_module, name)
    assert len(os.listdir(tmp_path)) == 2
    assert complete_checkpoints(tmp_path) == []
    (tmp_path / "step=1.ckpt.gone").mkdir()
    fit_saving(tmp_path, last)
    assert sorted(os.listdir(tmp_path)) == [
        "latest",
        "step=1.ckpt",
        "step=1.ckpt.gone",
        "step=2.ckpt",
    ]


def test_what_a_living_process_writes_is_left_alone_and_its_name_is_refused(tmp_path: Path) -> None:
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


def test_a_process_of_another_machine_is_gone_when_it_was_silent_for_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks need not reach from one machine to the other; its clock is not compared with ours."""
    save(tmp_path / "b.ckpt", 1)
    part = (tmp_path / "b.ckpt").rename(part_name(tmp_path / "a.ckpt"))
    lock = Path(f"{part}.lock")
    lock.write_text(json.dumps({"machine": "another", "host": "there", "pid": 1}))
    keeper, now = SaveFolders(), time.monotonic()
    for seconds, touched, expected in (
        (0, 1, True),
        (100, 2, True),
        (200, 3, True),
        (310, 3, True),
        (330, 3, False),
    ):
        os.utime(lock, (touched, touched))
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        keeper.tidy(tmp_path)
        assert part.exists() == expected
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "latest"]
    assert os.readlink(tmp_path / "latest") == "a.ckpt"


def test_other_peoples_files_with_such_names(tmp_path: Path) -> None:
    for name in ("thesis.tmp-01", "photos.old-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "years.tex").write_text("of work")
    (tmp_path / "data.tmp-12").write_text("mine")
    save(tmp_path / "a.ckpt", 1)
    assert len(list(tmp_path.glob("*.tmp-*"))) == 2
    assert (tmp_path / "photos.old-ab" / "years.tex").is_file()


def test_a_removal_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1)
    _run_killed(functools.partial(discard, tmp_path / "a.ckpt"), os, "unlink")
    assert complete_checkpoints(tmp_path) == []
    assert not (tmp_path / "a.ckpt").exists()
    SaveFolders().tidy(tmp_path)
    assert os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("behind", [False, True])
def test_finishing_that_is_killed_is_finished_by_the_next(tmp_path: Path, behind: bool) -> None:
    """At any operation, after a save of a new name and of one that was there was killed at any
    operation."""
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
