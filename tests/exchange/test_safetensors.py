"""Safetensors files of this package and of the library."""

import json
import os
import resource
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_ptdp.checkpoint import CheckpointError, TensorEntry
from lightning_ptdp.checkpoint.tensor_files import list_safetensors
from lightning_ptdp.exchange import open_safetensors, write_safetensors

TENSORS = {
    "a": torch.randn(3, 4),
    "b.weight": torch.randn(5).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "odd": torch.tensor([True, False, True]),
    "after odd": torch.arange(4),
    "half": torch.randn(2, 2, 2).half(),
}


def test_library_reads_written_file(tmp_path):
    asked = []

    def read(name):
        asked.append(name)
        return TENSORS[name]

    entries = {
        name: TensorEntry(shape=tuple(value.shape), dtype=value.dtype)
        for name, value in TENSORS.items()
    }
    write_safetensors(tmp_path / "x.safetensors", entries, read, metadata={"format": "pt"})
    assert asked == list(TENSORS)
    for found in (
        load_file(tmp_path / "x.safetensors"),
        open_safetensors(tmp_path / "x.safetensors"),
    ):
        assert found.keys() == TENSORS.keys()
        for name, value in TENSORS.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def test_file_of_library_is_read(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for name, value in open_safetensors(tmp_path / "x.safetensors").items():
        assert torch.equal(value, TENSORS[name])


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
            "invalid shape, data type, or offset",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
            "invalid offset for tensor `a`",
        ),
        (b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}', "unknown variant `F99`"),
        (
            b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
            "integer `-2`, expected usize",
        ),
        (b'{"a":{"dtype":"F32"}}', "missing field `shape`"),
        (b"[1, 2", "is not a complete safetensors file"),
    ],
)
def test_invalid_header_is_refused(tmp_path, header, words):
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=words):
        open_safetensors(tmp_path / "x.safetensors")


def test_dtype_unknown_to_safetensors_is_refused(tmp_path):
    entry = TensorEntry(shape=(1,), dtype=torch.complex128)
    with pytest.raises(
        CheckpointError, match=r"'z' is torch\.complex128, which safetensors cannot store"
    ):
        write_safetensors(tmp_path / "x", {"z": entry}, lambda name: torch.zeros(1))


@pytest.mark.parametrize("read", [list_safetensors, open_safetensors])
def test_pipe_is_refused_without_waiting(tmp_path, read):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors cannot be read: it is not a regular file"
    ):
        read(tmp_path / "x.safetensors")


def test_sparse_file_of_four_tebibytes_is_refused(tmp_path):
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ).encode()
    with open(tmp_path / "x.safetensors", "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (1 << 42))
    with (
        pytest.raises(CheckpointError, match=r"x\.safetensors cannot be mapped into memory"),
        _address_space(1 << 42),
    ):
        open_safetensors(tmp_path / "x.safetensors")


@contextmanager
def _address_space(most_bytes):
    """Limit this process's address space, like a machine without overcommitment."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
