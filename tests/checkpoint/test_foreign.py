"""Untrusted checkpoints with valid digests: their content is checked and never executed."""

import json
import os
import shutil

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    complete_checkpoints,
    files,
    newest_checkpoint,
    read_full,
    read_metadata,
    verify_checkpoint,
)
from tests.checkpoint.layouts import save
from tests.hostile.forged_checkpoints import forge, sign


@pytest.fixture
def new(tmp_path):
    return save(tmp_path / "new", {"w": torch.arange(6.0).view(2, 3)})


def test_malformed_metadata_does_not_hide_other_checkpoints(new, tmp_path):
    content = json.loads((new / "metadata.json").read_bytes())
    odd = tmp_path / "odd"
    shutil.copytree(new, odd)
    for key in content:
        for lie in (
            None,
            [],
            {},
            "x",
            -1,
            10**30,
            [[0]],
            {"a": 1},
            {"a": {"shape": "x", "dtype": "hub", "size": {}}},
        ):
            forge(
                odd,
                {**content, key: lie, "created": 4e9 if key != "created" else lie},
                signed=key != "sha256",
            )
            assert new in complete_checkpoints(tmp_path)
    for depth in (200, 100_000):
        (odd / "metadata.json").write_text("[" * depth + "]" * depth)
        assert newest_checkpoint(tmp_path) == new
        with pytest.raises(CheckpointError, match=r"odd/metadata\.json is"):
            read_metadata(odd)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tensors": {"model/w": {"shape": [10**13], "dtype": "float32"}}},
            r"tensors need 40000000000000 bytes, but the files",
        ),
        (
            {"tensors": {"model/w": {"shape": [0, 2**60], "dtype": "float32"}}},
            r"tensors\.model/w\.shape\[1\] is 1152921504606846976, but must be",
        ),
        (
            {"tensors": {"model/w": {"shape": [2, 3], "dtype": "hub"}}},
            r"tensors\.model/w\.dtype is 'hub', but must be a dtype",
        ),
        ({"tensors": {"model/w": {"dtype": "float32"}}}, r"tensors\.model/w\.shape is missing"),
        (
            {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
            r"files\.\.\./x is '\.\./x', but must be the name of a file in this folder",
        ),
        ({"files": {}}, r"files does not list index\.json"),
        ({"run": {"aliases": ["w"]}}, r"run\.aliases is a list of 1 items, but must be an object"),
        ({"created": float("nan")}, r"created is nan, but must be a number"),
    ],
)
def test_impossible_metadata_is_refused(new, change, words):
    forge(new, {**json.loads((new / "metadata.json").read_bytes()), **change})
    with pytest.raises(CheckpointError, match=rf"new/metadata\.json is damaged: {words}"):
        read_metadata(new)


def check_refused(path, words):
    for read in (verify_checkpoint, read_full):
        with pytest.raises(CheckpointError, match=words):
            read(path)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([[0, 10**13, [0, 0], [2, 3]]], r"would reach beyond the end of rank0-0\.safetensors"),
        (
            [[0, None, [0, 0], [2, 10**13]]],
            r"is \[2, 10000000000000\] at \[0, 0\], which is outside the tensor of shape \[2, 3\]",
        ),
        ([[0, None, [0, 0], [1, 3]]], r"cover 3 of 6 elements; \[1:2, 0:3\] is not covered"),
        ([[0, None, [0, 0], [2, 3]]] * 2, "overlaps another one"),
        ([[1, None, [0, 0], [2, 3]]], r"\[0\] is 1, but must be an integer from 0 to 0"),
        ([[0, None, [0], [6]]], "which is outside the tensor of shape"),
        ([[0, 120]], r"must be \[file, begin, offset, shape\]"),
        (
            [[0, None, [0, column], [2, 1]] for column in range(3)] * 3000,
            r"has about \d+ values, more than the limit of \d+",
        ),
    ],
)
def test_inconsistent_index_is_refused(new, chunks, words):
    content = json.loads((new / "index.json").read_bytes())
    begin = content["tensors"]["model/w"][0][1]
    chunks = [[begin if field is None else field for field in chunk] for chunk in chunks]
    (new / "index.json").write_text(json.dumps({**content, "tensors": {"model/w": chunks}}))
    sign(new)
    check_refused(new, words)


@pytest.mark.parametrize("sums", [b"", b"\0" * 11, b"\0" * 8, b"\0" * 12])
def test_incomplete_checksums_are_refused(new, sums):
    (new / "rank0-0.crc").write_bytes(sums)
    sign(new)
    check_refused(new, r"rank0-0\.crc is damaged: it has (0|8|11|12) bytes")


@pytest.mark.parametrize(
    "name", ["metadata.json", "index.json", "state.json", "rank0-0.safetensors", "rank0-0.crc"]
)
def test_links_to_outside_and_pipes_are_refused(new, tmp_path, name):
    (new / name).rename(tmp_path / "elsewhere")
    (new / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError,
        match=rf"{name} cannot be read: it is a link to .*/elsewhere, which is outside its folder",
    ):
        verify_checkpoint(new)
    (new / name).unlink()
    os.mkfifo(new / name)
    with pytest.raises(
        CheckpointError, match=rf"has no {name}|{name} cannot be read: it is not a regular file"
    ):
        verify_checkpoint(new)
    (new / name).unlink()
    (tmp_path / "elsewhere").rename(new / "inside")
    (new / name).symlink_to("inside")
    verify_checkpoint(new)


def test_sparse_file_needs_checksums_of_all_blocks(new):
    os.truncate(new / "rank0-0.safetensors", 1 << 42)
    sign(new)
    with pytest.raises(
        CheckpointError,
        match=r"rank0-0\.crc is damaged: it has 4 bytes, but for a file of 4398046511104",
    ):
        verify_checkpoint(new)


def test_save_refuses_invalid_metadata_and_state(tmp_path):
    for metadata, state, words in (
        ({"aliases": {"v": 3}}, {}, r"aliases\.v is 3, but must be text"),
        ({"global_step": "x"}, {}, "global_step is 'x', but must be an integer"),
        (
            {},
            {"optimizer_states": [3]},
            r"state: optimizer_states\[0\] is 3, but must be an object",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            save(tmp_path / "c", {"w": torch.ones(2)}, state=state, metadata=metadata)
        assert files.leftovers(tmp_path / "c") == [] and not (tmp_path / "c").exists()
