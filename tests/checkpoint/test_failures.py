"""A save that fails on one rank fails on all ranks and keeps the previous checkpoint."""

import contextlib
import errno
import os
import re
import resource
import shutil

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    data_files,
    metadata,
    read_full,
    read_metadata,
    reading,
    same_outcome,
    save_checkpoint,
    saved_state,
    to_lightning_file,
    verify_checkpoint,
    write_file,
)
from lightning_ptdp.checkpoint import files as files_module
from lightning_ptdp.parameters.placement import Piece, Placement
from tests.checkpoint.layouts import save

ROWS = 200_000


def _half(rank, value, *, rows=ROWS):
    piece = Piece(local=(0,), full=(rank * rows,), size=(rows,))
    record = Placement(
        full_shape=(2 * rows,), local_shape=(rows,), pieces=(piece,), sharded=("tensor",)
    )
    return {"model/w": (torch.full((rows,), value), record)}


@contextlib.contextmanager
def _full_disk(limit):
    """Limit files of this process to ``limit`` bytes, so that writes fail, even for root."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def _disk_full(rank):
    return {"tensors": _half(rank, 2.0)}


def _wrong_local_shape(rank):
    tensors = _half(rank, 2.0)
    if rank == 1:
        tensors["model/w"] = (torch.zeros(3), tensors["model/w"][1])
    return {"tensors": tensors}


def _other_dtype(rank):
    tensor, record = _half(rank, 2.0)["model/w"]
    return {"tensors": {"model/w": (tensor.bfloat16() if rank else tensor, record)}}


def _uncovered(rank):
    return {"tensors": _half(0, 2.0)}


def _overlapping(rank):
    tensor, _ = _half(rank, 2.0)["model/w"]
    piece = Piece(local=(0,), full=(rank * (ROWS - 10),), size=(ROWS,))
    record = Placement(full_shape=(2 * ROWS,), local_shape=(ROWS,), pieces=(piece,))
    return {"tensors": {"model/w": (tensor, record)}}


def _class_in_the_state(rank):
    return {"tensors": _half(rank, 2.0), "state": {"callbacks": {"mine": [1, object()]}}}


def _not_json(rank):
    return {"tensors": _half(rank, 2.0), "metadata": {"layout": {1, 2}}}


CASES = [
    (_disk_full, r"rank 1: .*OSError: .*File too large"),
    (
        _wrong_local_shape,
        r"rank 1: 'model/w' has the local shape \(3,\), but its placement has \(200000,\)",
    ),
    (
        _other_dtype,
        r"'model/w' is torch.float32 .* on rank 0, but torch.bfloat16 of \(400000,\) on rank 1",
    ),
    (
        _uncovered,
        r"'model/w': the rectangles to save cover 200000 of 400000 elements; \[200000:400000\] "
        r"is not covered",
    ),
    (
        _overlapping,
        r"'model/w': of the rectangles to save, \[199990:399990\] overlaps "
        r"another one",
    ),
    (_class_in_the_state, r"rank 0: state\['callbacks'\]\['mine'\]\[1\] is a builtins.object"),
    (_not_json, r"rank 0: metadata\['layout'\] = \{1, 2\} cannot be written as JSON"),
]


def _save_then_fail(rank, case, path):
    save_checkpoint(path, tensors=_half(rank, 1.0, rows=10), state={}, metadata={})
    limit = _full_disk(100_000) if case is _disk_full and rank == 1 else contextlib.nullcontext()
    with limit, pytest.raises(CheckpointError) as error:
        save_checkpoint(path, **{"state": {}, "metadata": {}, **case(rank)})
    assert sorted(os.listdir(os.path.dirname(path))) == ["last.ckpt"]
    return str(error.value)


@pytest.mark.parametrize(("case", "words"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_failing_rank_fails_all_ranks_and_keeps_checkpoint(pool, tmp_path, case, words):
    messages = pool.run(_save_then_fail, world_size=2, args=(case, str(tmp_path / "last.ckpt")))
    assert messages[0] == messages[1]
    assert re.search(words, messages[0]), messages[0]
    assert torch.equal(read_full(tmp_path / "last.ckpt")["w"], torch.ones(20))


def test_single_process_checks_cover_on_save_load_and_verify(tmp_path, monkeypatch):
    half = _half(0, 1.0, rows=10)
    with pytest.raises(CheckpointError, match="the rectangles to save cover 10 of 20 elements"):
        save_checkpoint(tmp_path / "c", tensors=half, state={}, metadata={})
    with monkeypatch.context() as patch:
        patch.setattr(
            data_files,
            "check_held",
            lambda ranks, _: {one.name: one.entry for held in ranks for one in held},
        )
        save_checkpoint(tmp_path / "c", tensors=half, state={}, metadata={})
    words = r"'model/w': the rectangles {} cover 10 of 20 elements; \[10:20\] is not covered"
    with pytest.raises(CheckpointError, match=words.format("to load")):
        read_full(tmp_path / "c")
    with pytest.raises(CheckpointError, match=words.format(f"in {tmp_path / 'c'}")):
        verify_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (metadata, "_MOST_JSON", r"could not be read back: it has \d+ bytes, more than the limit"),
        (saved_state, "MOST_SMALL", r"state: its JSON has \d+ bytes, more than the limit"),
    ],
)
def test_content_that_cannot_be_read_is_not_written(module, name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, 200)
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "c", {f"w{i}": torch.ones(2) for i in range(50)}, state={"a": [1] * 99})
    assert not list(tmp_path.iterdir())


def _save_twice(rank, path):
    save_checkpoint(path, tensors=_half(rank, 1.0, rows=10), state={}, metadata={"save": 1})
    save_checkpoint(path, tensors=_half(rank, 2.0, rows=11), state={}, metadata={"save": 2})


def test_second_save_replaces_checkpoint_and_leftovers(pool, tmp_path):
    (tmp_path / "last.ckpt.old-0123456789ab").mkdir()
    (tmp_path / "last.ckpt.tmp-0123456789ab").mkdir()
    pool.run(_save_twice, world_size=2, args=(str(tmp_path / "last.ckpt"),))
    assert torch.equal(read_full(tmp_path / "last.ckpt")["w"], torch.full((22,), 2.0))
    assert read_metadata(tmp_path / "last.ckpt").run == {"save": 2}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def _save_one(path, value):
    save(path, {"w": torch.tensor([value])})


def _check_kept(path):
    """Check that the first checkpoint is intact and alone in its folder."""
    assert read_full(path)["w"].item() == 1.0
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_file_and_empty_folder_are_replaced(tmp_path):
    (tmp_path / "file").write_text("Lightning's single file")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "new/deep"):
        _save_one(tmp_path / name, 1.0)
        assert read_full(tmp_path / name)["w"].item() == 1.0


def test_folder_with_other_content_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is a folder with other content"):
        _save_one(tmp_path, 1.0)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_reason_of_error_without_number_is_named():
    with (
        pytest.raises(CheckpointError, match=r"index\.json cannot be read: no answer"),
        reading("index.json"),
    ):
        raise OSError("no answer")


def test_pipe_or_device_is_not_replaced(tmp_path):
    _save_one(tmp_path / "source", 1.0)
    os.mkfifo(path := tmp_path / "pipe.ckpt")
    for write in (
        lambda: _save_one(path, 1.0),
        lambda: write_file({}, path),
        lambda: to_lightning_file(tmp_path / "source", path),
    ):
        with pytest.raises(CheckpointError, match=r"pipe.ckpt is neither a file nor a folder"):
            write()
    assert path.is_fifo()


def test_failed_rename_restores_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    _save_one(path, 1.0)
    rename = os.rename

    def fail_for_the_new_one(source, target):
        if ".tmp-" in str(source) and str(target) == str(path):
            raise OSError("injected")
        rename(source, target)

    monkeypatch.setattr(files_module.os, "rename", fail_for_the_new_one)
    with pytest.raises(CheckpointError, match="injected"):
        _save_one(path, 2.0)
    _check_kept(path)


def test_read_only_folder_fails_save_and_keeps_checkpoint(tmp_path, monkeypatch):
    path, mkdir = tmp_path / "last.ckpt", os.mkdir
    _save_one(path, 1.0)

    # permissions do not stop root, and tests may run as root
    def refuse(made, *args, **kwargs):
        if str(made).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(made))
        mkdir(made, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(
        CheckpointError, match=r"saving the checkpoint .*last\.ckpt failed: .*Read-only file system"
    ):
        _save_one(path, 2.0)
    _check_kept(path)


def test_storage_lost_during_save_is_reported(tmp_path, monkeypatch):
    kept, gone = tmp_path / "kept" / "a.ckpt", tmp_path / "gone" / "b.ckpt"
    _save_one(kept, 1.0)
    write = data_files.write_rectangles

    def vanish(*args, **options):
        entries = write(*args, **options)
        shutil.rmtree(gone.parent)
        return entries

    monkeypatch.setattr(data_files, "write_rectangles", vanish)
    with pytest.raises(
        CheckpointError, match=r"saving the checkpoint .*b\.ckpt failed: FileNotFoundError: .*gone"
    ):
        _save_one(gone, 2.0)
    assert not gone.parent.exists()
    assert read_full(kept)["w"].item() == 1.0


def test_error_names_leftover_of_interrupted_rename(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    _save_one(path, 1.0)
    path.rename(tmp_path / "last.ckpt.old-0123456789ab")
    with pytest.raises(
        CheckpointError, match=r"interrupted save left .*last\.ckpt\.old-0123456789ab. Rename"
    ):
        read_metadata(path)


def _fail_on(rank, failing):
    with same_outcome("the test"):
        if rank in failing:
            raise KeyError(f"key {rank % 2}")


def _raise_on(rank, failing):
    with pytest.raises(CheckpointError) as error:
        _fail_on(rank, failing)
    return str(error.value)


def test_same_outcome_names_failing_ranks(pool):
    for failing, words in (
        ([0, 2, 3], "rank 0, 2: KeyError: 'key 0'; rank 3: KeyError: 'key 1'"),
        ([2], "rank 2: KeyError"),
    ):
        messages = pool.run(_raise_on, world_size=4, args=(failing,))
        assert len(set(messages)) == 1
        assert words in messages[0]
