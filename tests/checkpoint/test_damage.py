"""Damaged, incomplete and foreign checkpoints are refused with a CheckpointError."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    load_tensors,
    read_full,
    read_metadata,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint import metadata as metadata_module
from lightning_ptdp.parameters.placement import Piece, Placement
from tests.checkpoint.layouts import Layout, blank, held, save
from tests.data.folders import flip

FILES = [
    "metadata.json",
    "index.json",
    "state.json",
    "README.txt",
    "rank0-0.safetensors",
    "rank0-0.crc",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "c"
    save_checkpoint(
        path,
        tensors=held(Layout(1), 0),
        state={"epoch": 1, "x": torch.ones(3)},
        metadata={"layout": "t1"},
    )
    return path


@pytest.fixture
def torn(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "c"))


def read_all(path):
    read_metadata(path)
    read_state(path)
    load_tensors(path, blank(held(Layout(1), 0)))


def test_undamaged_checkpoint_is_readable(torn):
    assert sorted(os.listdir(torn)) == sorted(FILES)
    read_all(torn)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0, None], ids=["0.0", "0.5", "1.0", "missing"])
def test_truncated_or_missing_file_is_named(torn, file, keep):
    content = (torn / file).read_bytes()
    if keep is None:
        (torn / file).unlink()
    else:
        (torn / file).write_bytes(content[: min(int(len(content) * keep), len(content) - 1)])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        read_all(torn)


def test_verify_finds_flipped_bit_in_any_file(torn):
    for file in FILES:
        content = (torn / file).read_bytes()
        for place in range(0, len(content), max(1, len(content) // 150)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            (torn / file).write_bytes(flipped)
            with pytest.raises(CheckpointError):
                verify_checkpoint(torn)
        (torn / file).write_bytes(content)
    assert verify_checkpoint(torn) == read_metadata(torn)


def test_verify_finds_truncation_of_any_file(torn):
    for file in FILES:
        content = (torn / file).read_bytes()
        for length in range(0, len(content), max(1, len(content) // 50)):
            (torn / file).write_bytes(content[:length])
            with pytest.raises(CheckpointError):
                verify_checkpoint(torn)
        (torn / file).write_bytes(content)


def test_verify_names_every_damaged_file_of_its_part(pool, tmp_path):
    pool.run(_save_two, world_size=2, args=(str(tmp_path / "c"),))
    for name in ("rank0-0.safetensors", "rank1-0.safetensors"):
        flip(tmp_path / "c" / name)
    with pytest.raises(
        CheckpointError,
        match=r"rank0-0\.safetensors is damaged: the CRC-32 of bytes .*rank1-0\.safetensors is damaged: the CRC-32 of bytes",
    ):
        verify_checkpoint(tmp_path / "c")
    for part in range(2):
        with pytest.raises(CheckpointError) as error:
            verify_checkpoint(tmp_path / "c", part=part, parts=2)
        assert [f"rank{rank}-0" in str(error.value) for rank in range(2)] == [part == 0, part == 1]


def _save_two(rank, path):
    save_checkpoint(path, tensors=held(Layout(2, t=2), rank), state={}, metadata={})


def test_load_checks_only_bytes_it_reads(tmp_path):
    full = torch.arange(300_000.0).view(3000, 100)
    file = save(tmp_path / "c", {"w": full}) / "rank0-0.safetensors"
    content = bytearray(file.read_bytes())
    content[content.index(full[2900, 7].numpy().tobytes())] ^= 1
    file.write_bytes(content)
    piece = Piece(local=(0, 0), full=(100, 0), size=(1000, 100))
    target = torch.zeros(1000, 100)
    record = Placement(full_shape=(3000, 100), local_shape=(1000, 100), pieces=(piece,))
    load_tensors(tmp_path / "c", {"model/w": (target, record)})
    assert torch.equal(target, full[100:1100])
    with pytest.raises(
        CheckpointError,
        match=r"rank0-0\.safetensors is damaged: the CRC-32 of bytes \d+ to \d+ differs",
    ):
        read_full(tmp_path / "c")


def test_every_flipped_byte_of_metadata_is_detected(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(2)}, metadata={"layout": "t1"})
    file = tmp_path / "c" / "metadata.json"
    content = file.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= (0x01, 0x20, 0xFF)[place % 3]
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_metadata(tmp_path / "c")


def _rewrite(path, **changes):
    """Change metadata.json and update its digest."""
    file = path / "metadata.json"
    content = {**json.loads(file.read_bytes()), **changes}
    del content["sha256"]
    file.write_text(json.dumps({**content, "sha256": metadata_module._digest(content)}))


@pytest.mark.parametrize("version", [3, 5])
def test_other_format_version_is_refused(torn, version):
    _rewrite(torn, version=version)
    with pytest.raises(
        CheckpointError, match=f"format version {version}, but this lightning-ptdp reads version 4"
    ):
        read_all(torn)


def test_path_without_checkpoint_is_refused(tmp_path):
    (tmp_path / "single.ckpt").write_bytes(b"x")
    for name, words in (
        ("", "has no metadata.json"),
        ("single.ckpt", "is a file"),
        ("nothing", "does not exist"),
    ):
        for read in (read_metadata, read_state, read_full):
            with pytest.raises(CheckpointError, match=words):
                read(tmp_path / name)
    (tmp_path / "metadata.json").write_text('{"format": "pt"}')
    with pytest.raises(CheckpointError, match="is not the metadata of"):
        read_metadata(tmp_path)
