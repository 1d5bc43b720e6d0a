"""Targets that are refused because they overlap a source of the same command."""

import os

import pytest

from lightning_ptdp.callbacks import ExportHuggingFace
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.checkpoint.files import EXPORT_MARK, check_apart, existing_paths
from lightning_ptdp.checkpoint.single_file import file_to_write
from tests.models.fits import quiet_trainer


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "models" / "base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    "target",
    ["models/base", "models/base/tuned", "models", "link", "models/../models/base/", "link/x/y"],
)
def test_target_overlapping_source_is_refused(base, tmp_path, target):
    with pytest.raises(
        CheckpointError,
        match=r"^--export .* would change .*base, which is the source. Choose another path$",
    ):
        check_apart(tmp_path / target, [tmp_path / "absent", base], what="--export")


def test_relative_target_overlapping_source_is_refused(base, monkeypatch):
    monkeypatch.chdir(base.parent)
    with pytest.raises(CheckpointError, match="would change"):
        check_apart("base", [base])


def test_target_next_to_source_is_accepted(base, tmp_path):
    (base / "data.jsonl").write_text("")
    check_apart(
        tmp_path / "models" / "base-tuned", [base, base / "data.jsonl", tmp_path / "absent"]
    )


def test_existing_paths_are_found_in_options(base):
    options = {
        "path": str(base),
        "rows": 3,
        "files": [str(base / "config.json"), "absent", None],
        "text": "a\0b",
        "at": {"x": base},
    }
    assert list(existing_paths(options)) == [base, base / "config.json", base]


def test_export_over_base_model_is_refused(base, tmp_path):
    (base / EXPORT_MARK).touch()
    callback = ExportHuggingFace(tmp_path / "link")
    with pytest.raises(CheckpointError, match=r"export folder .* would change"):
        callback.check(quiet_trainer(), [{"init_args": {"path": os.fspath(base)}}])


def test_export_over_another_model_is_refused(base):
    with pytest.raises(
        CheckpointError, match="is a folder with other content, which would be lost"
    ):
        ExportHuggingFace(base)


def test_export_below_file_is_refused(base):
    with pytest.raises(
        ValueError, match=r"config\.json is a file, so no folder can be created there"
    ):
        ExportHuggingFace(base / "config.json" / "x").check(quiet_trainer(), [])


def test_mount_point_is_refused_before_training():
    """The kernel does not rename it, so that the export would fail at the end."""
    with pytest.raises(CheckpointError, match="/proc is a mount point"):
        ExportHuggingFace("/proc")


def test_file_of_a_lower_layer_is_replaced(tmp_path, monkeypatch):
    """Overlay file systems may report such a file as a mount point."""
    (tmp_path / "last.ckpt").touch()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert file_to_write(tmp_path / "last.ckpt") == tmp_path / "last.ckpt"
