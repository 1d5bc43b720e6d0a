"""Checkpoints that somebody else wrote, with every digest right: they can say what they like, and
nothing of it is believed or run."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from lightning_ptdp.checkpoint import (
    CheckpointError,
    complete_checkpoints,
    files,
    newest_checkpoint,
    read_full,
    read_metadata,
    reshard_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.parameters.sharding import Sharding
from tests.checkpoint.format_1 import STORED
from tests.hostile.forging import forge, sign


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "old"))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    tensors = {"model/w": (torch.arange(6.0).view(2, 3), Sharding.replicated((2, 3)))}
    save_checkpoint(tmp_path / "new", tensors=tensors, state={}, metadata={})
    return tmp_path / "new"


class _Harmful:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def _sets_on_a_class(harm: Path) -> bytes:
    """State on the class of all paths, as pickle's BUILD takes it: (what goes to __dict__, what is
    set as attributes)."""
    return (
        b"\x80\x04cpathlib\nPosixPath\n(N}(X\x07\x00\x00\x00is_filecos\nmkdir\nut\x94b"
        + pickle.dumps(_Harmful(harm))[2:]
    )


def test_torchs_index_is_for_torchs_tools_and_never_unpickled(new: Path, tmp_path: Path) -> None:
    is_file = Path.is_file
    for content in (
        pickle.dumps(_Harmful(tmp_path / "harm")),
        _sets_on_a_class(tmp_path / "harm"),
        b"",
        b"\x80\x04",
    ):
        (new / ".metadata").write_bytes(content)
        sign(new)
        verify_checkpoint(new)
        assert torch.equal(read_full(new)["w"], torch.arange(6.0).view(2, 3))
        reshard_checkpoint(new, tmp_path / "out")
    assert not (tmp_path / "harm").exists() and Path.is_file is is_file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda harm: pickle.dumps(_Harmful(harm)), r"it holds posix\.mkdir, which has no place"),
        (_sets_on_a_class, "sets a state on what is not an object of its own"),
        (lambda harm: b"ctorch\nhub.load\n.", r"it holds torch\.hub\.load"),
        (lambda harm: pickle.dumps(dcp.Metadata({})), "storage_data is a NoneType"),
        (lambda harm: b"\x80\x04r\xff\xff\xff\xff.", "is not a whole pickle"),
        (lambda harm: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "it holds a list"),
        (lambda harm: b"", "is not a whole pickle"),
    ],
)
def test_of_format_1_it_is_read_as_data(
    old: Path, tmp_path: Path, content: Callable[[Path], bytes], words: str
) -> None:
    is_file = Path.is_file
    (old / ".metadata").write_bytes(content(tmp_path / "harm"))
    sign(old)
    for read in (verify_checkpoint, read_full):
        with pytest.raises(CheckpointError, match=rf"\.metadata is damaged: .*{words}"):
            read(old)
    assert not (tmp_path / "harm").exists() and Path.is_file is is_file


class _OlderPickler(pickle.Pickler):
    """As Python 3.11.2 pickles the members of enumerations."""

    def reducer_override(self, value: Any) -> Any:
        return (
            (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented
        )


@pytest.mark.parametrize("protocol", [2, 4])
def test_indexes_of_format_1_by_other_releases_of_python(
    old: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_state = TensorProperties.__setstate__
    # Needed until torch 2.15: before it there are no strides, the sixth property of the stored
    # index.
    monkeypatch.setattr(
        TensorProperties, "__setstate__", lambda self, state: set_state(self, state[:5])
    )
    before, stream = read_full(old), io.BytesIO()
    _OlderPickler(stream, protocol=protocol).dump(pickle.loads((old / ".metadata").read_bytes()))
    (old / ".metadata").write_bytes(stream.getvalue())
    assert b"getattr" in stream.getvalue()
    sign(old)
    verify_checkpoint(old)
    assert all(torch.equal(value, before[name]) for name, value in read_full(old).items())


def test_format_1_is_written_again_as_today(old: Path, tmp_path: Path) -> None:
    reshard_checkpoint(old, tmp_path / "out")
    assert (read_metadata(old).format_version, read_metadata(tmp_path / "out").format_version) == (
        1,
        2,
    )
    assert all(
        torch.equal(value, read_full(tmp_path / "out")[name])
        for name, value in read_full(old).items()
    )


def test_one_odd_folder_spoils_nothing_for_its_neighbours(new: Path, tmp_path: Path) -> None:
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
            r"tensors would need 40000000000000 bytes, but the files",
        ),
        (
            {"tensors": {"model/w": {"shape": [0, 2**60], "dtype": "float32"}}},
            r"tensors\.model/w\.shape\[1\] is 1152921504606846976, not",
        ),
        (
            {"tensors": {"model/w": {"shape": [2, 3], "dtype": "hub"}}},
            r"tensors\.model/w\.dtype is 'hub', not a dtype",
        ),
        ({"tensors": {"model/w": {"dtype": "float32"}}}, r"tensors\.model/w\.shape is missing"),
        (
            {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
            r"files\.\.\./x is '\.\./x', not the name of a file in this folder",
        ),
        ({"files": {}}, r"files does not list index\.json"),
        ({"run": {"aliases": ["w"]}}, r"run\.aliases is a list of 1, not an object"),
        ({"created": float("nan")}, r"created is nan, not a number"),
    ],
)
def test_what_cannot_be_true_is_said(new: Path, change: dict[str, Any], words: str) -> None:
    forge(new, {**json.loads((new / "metadata.json").read_bytes()), **change})
    with pytest.raises(CheckpointError, match=rf"new/metadata\.json is damaged: {words}"):
        read_metadata(new)


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([[0, 10**13, [0, 0], [2, 3]]], r"would reach beyond the end of __0_0\.distcp"),
        (
            [[0, 704, [0, 0], [2, 10**13]]],
            r"is \[2, 10000000000000\] at \[0, 0\], which is not in a tensor of \[2, 3\]",
        ),
        ([[0, 704, [0, 0], [1, 3]]], r"cover 3 of 6 elements; \[1:2, 0:3\] is in none of them"),
        ([[0, 704, [0, 0], [2, 3]]] * 2, "has elements that are in another one too"),
        ([[1, 704, [0, 0], [2, 3]]], r"\[0\] is 1, not a whole number from 0 to 0"),
        ([[0, 704, [0], [6]]], "which is not in a tensor of"),
        ([[0, 704]], r"is not \[file, begin, offset, shape\]"),
        (
            [[0, 704, [0, column], [2, 1]] for column in range(3)] * 3000,
            r"holds about \d+ values, at most \d+ are read",
        ),
    ],
)
def test_what_the_index_says_is_compared(new: Path, chunks: list[Any], words: str) -> None:
    content = json.loads((new / "index.json").read_bytes())
    (new / "index.json").write_text(json.dumps({**content, "tensors": {"model/w": chunks}}))
    sign(new)
    for read in (verify_checkpoint, read_full):
        with pytest.raises(CheckpointError, match=words):
            read(new)


@pytest.mark.parametrize(
    "sums", [b"", b"\0" * 11, b"\0" * 24, bytes([0, 0, 0, 0, 0, 0, 0, 9]) + b"\0" * 4]
)
def test_sums_that_leave_out_a_part_of_the_file(new: Path, sums: bytes) -> None:
    (new / "__0_0.crc").write_bytes(sums)
    sign(new)
    for read in (verify_checkpoint, read_full):
        with pytest.raises(
            CheckpointError,
            match=r"__0_0\.crc is damaged: it (has 11 bytes|does not list the blocks)",
        ):
            read(new)


@pytest.mark.parametrize(
    "name", ["metadata.json", "index.json", "state.pt", "__0_0.distcp", "__0_0.crc"]
)
def test_links_that_lead_elsewhere_and_pipes_are_not_read(
    new: Path, tmp_path: Path, name: str
) -> None:
    (new / name).rename(tmp_path / "elsewhere")
    (new / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError,
        match=rf"{name} cannot be read: it is a link to .*/elsewhere, outside of its folder",
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


def test_a_block_may_not_be_the_whole_of_a_file_with_holes(new: Path) -> None:
    os.truncate(new / "__0_0.distcp", 1 << 42)
    sign(new)
    with pytest.raises(CheckpointError, match=r"lists a block of \d+ bytes"):
        verify_checkpoint(new)


def test_what_would_be_refused_is_not_written(tmp_path: Path) -> None:
    tensors = {"model/w": (torch.ones(2), Sharding.replicated((2,)))}
    for metadata, state, words in (
        ({"aliases": {"v": 3}}, {}, r"aliases\.v is 3, not text"),
        ({"global_step": "x"}, {}, "global_step is 'x', not a whole number"),
        ({}, {"optimizer_states": [3]}, r"state: optimizer_states\[0\] is 3, not an object"),
    ):
        with pytest.raises(CheckpointError, match=words):
            save_checkpoint(tmp_path / "c", tensors=tensors, state=state, metadata=metadata)
        assert files.leftovers(tmp_path / "c") == [] and not (tmp_path / "c").exists()
