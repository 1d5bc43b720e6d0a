"""Torn, truncated, flipped and foreign checkpoints are refused with a typed error."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import CheckpointError, load_tensors, read_full, read_metadata, read_state, save_checkpoint
from lightning_ptdp.checkpoint import metadata as metadata_module
from lightning_ptdp.tensor_parallel.sharding import Sharding
from tests.checkpoint.layouts import Layout, blank, held

FILES = ["metadata.json", "state.pt", ".metadata", "__0_0.distcp"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "c"
    save_checkpoint(path, tensors=held(Layout(1), 0), state={"epoch": 1, "x": torch.ones(3)}, metadata={"layout": "t1"})
    return path


@pytest.fixture
def torn(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "c"))


def read_all(path: Path) -> None:
    read_metadata(path)
    read_state(path)
    load_tensors(path, blank(held(Layout(1), 0)))


def test_the_whole_one_reads(torn: Path) -> None:
    assert sorted(os.listdir(torn)) == sorted(FILES)
    read_all(torn)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_truncated(torn: Path, file: str, keep: float) -> None:
    content = (torn / file).read_bytes()
    (torn / file).write_bytes(content[: min(int(len(content) * keep), len(content) - 1)])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        read_all(torn)


@pytest.mark.parametrize("file", FILES)
def test_missing(torn: Path, file: str) -> None:
    (torn / file).unlink()
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        read_all(torn)


@pytest.mark.parametrize("file", ["state.pt", ".metadata"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.9])
def test_flipped(torn: Path, file: str, place: float) -> None:
    content = bytearray((torn / file).read_bytes())
    content[int(place * len(content))] ^= 1
    (torn / file).write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        read_all(torn)


def test_every_flipped_byte_of_the_metadata_is_noticed(tmp_path: Path) -> None:
    one = {"model/w": (torch.ones(2), Sharding.replicated((2,)))}
    save_checkpoint(tmp_path / "c", tensors=one, state={}, metadata={"layout": "t1"})
    file = tmp_path / "c" / "metadata.json"
    content = file.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= (0x01, 0x20, 0xFF)[place % 3]
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_metadata(tmp_path / "c")


def _rewrite(path: Path, **changes: object) -> None:
    """Change metadata.json and keep its digest right."""
    file = path / "metadata.json"
    content = {**json.loads(file.read_bytes()), **changes}
    del content["sha256"]
    file.write_text(json.dumps({**content, "sha256": metadata_module._digest(content)}))


def test_a_newer_format(torn: Path) -> None:
    _rewrite(torn, version=2)
    with pytest.raises(CheckpointError, match="format version 2, this lightning-ptdp reads up to 1: update"):
        read_all(torn)


def test_other_things_than_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "single.ckpt").write_bytes(b"x")
    for name, words in (("", "has no metadata.json"), ("single.ckpt", "is a file"), ("nothing", "does not exist")):
        for read in (read_metadata, read_state, read_full):
            with pytest.raises(CheckpointError, match=words):
                read(tmp_path / name)
    (tmp_path / "metadata.json").write_text('{"format": "pt"}')
    with pytest.raises(CheckpointError, match="is not the metadata of"):
        read_metadata(tmp_path)


class _Harmful:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_an_index_with_code_in_it_is_refused(torn: Path, tmp_path: Path) -> None:
    tensors = read_metadata(torn).tensors
    (torn / "metadata.json").unlink()
    (torn / ".metadata").write_bytes(pickle.dumps(_Harmful(tmp_path / "harm")))
    metadata_module.write_metadata(torn, metadata_module.describe_folder(torn, run={}, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which has no place"):
        read_full(torn)
    assert not (tmp_path / "harm").exists()


def test_an_index_may_name_of_torch_itself_only_dtypes_and_sizes(torn: Path) -> None:
    tensors = read_metadata(torn).tensors
    (torn / "metadata.json").unlink()
    (torn / ".metadata").write_bytes(b"ctorch\nhub.load\n.")
    metadata_module.write_metadata(torn, metadata_module.describe_folder(torn, run={}, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"names torch\.hub\.load, which has no place"):
        read_full(torn)
