"""The newest complete checkpoint is found, even if newer ones are damaged."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    choose_checkpoint,
    complete_checkpoints,
    mark_latest,
    newest_checkpoint,
)
from tests.checkpoint.layouts import save
from tests.data.folders import flip

VALUES = "rank0-0.safetensors"


def _save(path, value):
    return save(path, {"w": torch.full((5,), value)})


@pytest.fixture
def three(tmp_path):
    paths = [_save(tmp_path / name, 1.0) for name in ("c", "a", "b")]
    mark_latest(paths[-1])
    return paths


def test_latest_link_is_moved_without_leftovers(three):
    link = three[0].parent / "latest"
    assert os.readlink(link) == "b"
    mark_latest(three[0])
    assert os.readlink(link) == "c"
    assert sorted(os.listdir(link.parent)) == ["a", "b", "c", "latest"]


def test_latest_means_newest_without_symlink_support(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", refuse)
        with pytest.warns(
            UserWarning,
            match="latest cannot be created .no links here.. To resume, use newest_checkpoint",
        ):
            mark_latest(_save(tmp_path / "a", 1.0))
    assert choose_checkpoint(tmp_path / "latest") == tmp_path / "a"


def test_latest_works_in_moved_or_copied_folder(three, tmp_path):
    """The link is relative. A copy that follows links turns it into a folder."""
    moved = (tmp_path / "a").parent.rename(tmp_path.with_name("moved"))
    assert choose_checkpoint(moved / "latest") == moved / "b"
    copied = Path(shutil.copytree(moved, moved / "copied", symlinks=False))
    mark_latest(_save(copied / "d", 1.0))
    assert (copied / "latest").is_dir()
    assert choose_checkpoint(copied / "latest") == copied / "d"


def test_other_file_named_latest_is_kept(tmp_path):
    (tmp_path / "latest").write_text("news")
    mark_latest(_save(tmp_path / "a", 1.0))
    assert (tmp_path / "latest").read_text() == "news"


def test_newest_checkpoint_is_found_in_nested_folders(three, tmp_path):
    assert complete_checkpoints(tmp_path) == three[::-1]
    deep = _save(tmp_path / "runs" / "0" / "d", 1.0)
    (tmp_path / "runs" / "1").mkdir()
    assert complete_checkpoints(tmp_path) == three[::-1]
    assert newest_checkpoint(tmp_path) == deep
    assert newest_checkpoint(tmp_path / "runs" / "1") is None
    assert newest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("given", ["latest", ".", "b"])
def test_damaged_checkpoint_falls_back_to_previous_with_warning(three, tmp_path, given):
    assert choose_checkpoint(tmp_path / given) == three[2]
    flip(three[2] / VALUES)
    with pytest.warns(
        UserWarning,
        match=r"b/rank0-0\.safetensors is damaged: the CRC-32 of bytes .* Training resumes from the previous one, "
        r".*/a$",
    ):
        assert choose_checkpoint(tmp_path / given) == three[1]
    with pytest.raises(
        CheckpointError, match=r"b/rank0-0\.safetensors is damaged: .*. The previous one is .*/a$"
    ):
        choose_checkpoint(tmp_path / given, on_damage="refuse")
    flip(three[1] / "metadata.json")
    (three[0] / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"b/rank0-0\.safetensors is damaged"):
        choose_checkpoint(tmp_path / given)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda file: os.truncate(file, 9)])
def test_fallback_is_older_than_damaged_checkpoint(damage, three):
    damage(three[1] / VALUES)
    with pytest.warns(UserWarning, match="the previous one, .*/c"):
        assert choose_checkpoint(three[1]) == three[0]
    damage(three[0] / VALUES)
    with pytest.raises(CheckpointError, match=r"/c(/rank0-0\.safetensors)? is damaged"):
        choose_checkpoint(three[0])


def test_fallback_without_metadata_depends_on_time_of_files(three):
    flip(three[0] / VALUES)
    (three[1] / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="a is not a checkpoint, or is incomplete"):
        choose_checkpoint(three[1])
    os.utime(three[1] / VALUES)
    with pytest.warns(
        UserWarning, match=r"a is not a checkpoint, or is incomplete.*previous one, .*/b"
    ):
        assert choose_checkpoint(three[1]) == three[2]


def test_latest_resolves_after_save_interrupted_between_renames(tmp_path):
    mark_latest(_save(tmp_path / "last.ckpt", 1.0))
    _save(tmp_path / "new", 2.0).rename(tmp_path / "last.ckpt.tmp-0123456789ab")
    (tmp_path / "last.ckpt").rename(tmp_path / "last.ckpt.old-0123456789ab")
    assert choose_checkpoint(tmp_path / "latest") == tmp_path / "last.ckpt.tmp-0123456789ab"
    flip(tmp_path / "last.ckpt.tmp-0123456789ab" / VALUES)
    with pytest.warns(UserWarning, match="the previous one"):
        assert choose_checkpoint(tmp_path / "latest") == tmp_path / "last.ckpt.old-0123456789ab"


def test_missing_checkpoint_and_unknown_on_damage_are_refused(tmp_path):
    for name in ("latest", "other"):
        with pytest.raises(CheckpointError, match=r"does not exist|no complete checkpoint"):
            choose_checkpoint(tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"on_damage='ignore' must be one of \['previous', 'refuse'\]"
    ):
        choose_checkpoint(tmp_path, on_damage="ignore")


def test_undamaged_checkpoint_is_chosen_without_warning(three):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_checkpoint(three[0]) == three[0]
