"""Tests of data files: safetensors format, checksums and writing to disk."""

import os
import zlib
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from lightning_ptdp.checkpoint import CheckpointError, TensorEntry, data_files, files
from lightning_ptdp.checkpoint.checksums import (
    BLOCK,
    open_summed,
    parse_sums,
)
from lightning_ptdp.checkpoint.data_files import pieces_of, write_data_file
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle
from lightning_ptdp.checkpoint.remote_path import RemotePath, each
from lightning_ptdp.checkpoint.stored_tensor import StoredTensor, read_rectangle, rows_at_once
from tests.checkpoint.layouts import save
from tests.fake_cuda import fake_cuda

TENSORS = {
    "contiguous, many pieces": lambda: torch.randn(700, 1024),
    "columns": lambda: torch.randn(3000, 600)[:, 100:357],
    "transposed": lambda: torch.randn(300, 500).t(),
    "every other": lambda: torch.arange(100_000)[::2],
    "bf16 columns of three dimensions": lambda: torch.randn(40, 50, 64).bfloat16()[:, 5:, 3:40],
    "float8 without a code": lambda: torch.randn(20, 30).to(torch.float8_e5m2fnuz),
    "complex without a code": lambda: torch.randn(7, 2, dtype=torch.complex128),
    "float8": lambda: torch.randn(200, 200).to(torch.float8_e4m3fn),
    "broadcast": lambda: torch.ones(1, 5000).expand(30, 5000),
    "conjugate": lambda: torch.randn(7, 2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(7, 2, dtype=torch.complex64).conj().imag,
    "bools": lambda: torch.randn(9) > 0,
    "number": lambda: torch.tensor(2.5, dtype=torch.float64),
    "one element": lambda: torch.arange(3.0)[::2][1:],
    "nothing": lambda: torch.zeros(0, 7),
    "no columns": lambda: torch.zeros(5, 0),
}

_EMPTY = torch.empty
Written = dict[str, tuple[torch.Tensor, int]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write all tensors to one file; return name -> (tensor, byte where its values begin)."""
    path = tmp_path_factory.mktemp("data") / "x.safetensors"
    tensors = {name: make() for name, make in TENSORS.items()}
    stored, _ = write_data_file(path, [LocalRectangle.full(*item) for item in tensors.items()])
    return path, {name: (tensors[name], one.begin) for name, one in stored}


def _opened(path):
    size = path.stat().st_size
    sums = parse_sums(path.with_suffix(".crc").read_bytes(), size=size)
    return open_summed(path, sums, size=size)


def _pinned(*args, pin_memory, **kwargs):
    """Return an empty tensor; only GPUs have page-locked memory."""
    assert pin_memory
    return _EMPTY(*args, **kwargs)


def _bytes(tensor):
    values = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return values.view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_data_file_is_read_by_safetensors_and_package(written, name):
    path, (tensor, begin) = written[0], written[1][name]
    found = load_file(path)[f"{name}@{','.join('0' * tensor.dim())}"]
    if tensor.dtype in (torch.complex128, torch.float8_e5m2fnuz):  # dtypes that safetensors lacks
        assert found.dtype == torch.uint8 and found.shape == (*tensor.shape, tensor.itemsize)
    else:
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(_bytes(found), _bytes(tensor))
    target = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    with _opened(path) as file:
        entry = TensorEntry(shape=tuple(tensor.shape), dtype=tensor.dtype)
        stored = StoredTensor(file=path, begin=begin, entry=entry)
        read_rectangle(file, stored, LocalRectangle.full(name, target))
    assert torch.equal(_bytes(target), _bytes(tensor))


def test_header_of_many_tensors_is_checksummed_in_blocks(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = [LocalRectangle.full(f"model/{'long' * 20}.{n}", torch.ones(1)) for n in range(2000)]
    write_data_file(path, tensors)
    with _opened(path) as file:
        file.check()
    assert len(load_file(path)) == 2000


def test_checksums_are_crc32_of_each_block(written):
    content = written[0].read_bytes()
    sums = parse_sums(written[0].with_suffix(".crc").read_bytes(), size=len(content))
    blocks = [content[begin : begin + BLOCK] for begin in range(0, len(content), BLOCK)]
    assert sums.tolist() == [zlib.crc32(block) for block in blocks]


def test_large_tensors_begin_at_block_boundaries(tmp_path):
    sizes = {"bias": 7, "odd": 300_001, "weight": 8 * BLOCK, "small": 5}
    tensors = [LocalRectangle.full(name, torch.zeros(size)) for name, size in sizes.items()]
    stored, _ = write_data_file(tmp_path / "x.safetensors", tensors)
    begins = {name: one.begin for name, one in stored}
    assert begins["weight"] % BLOCK == begins["odd"] % BLOCK == 0
    few, _ = write_data_file(tmp_path / "y.safetensors", tensors[:1])
    assert few[0][1].begin < 200


@pytest.mark.parametrize("at", [0, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7, -1])
def test_damaged_byte_is_found_in_its_block(tmp_path, at):
    path = tmp_path / "x.safetensors"
    write_data_file(path, [LocalRectangle.full("w", torch.randn(3, 7001))])
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    place = range(len(content))[at]
    with _opened(path) as file:
        with pytest.raises(CheckpointError, match="the CRC-32 of bytes"):
            file.check()
        with pytest.raises(CheckpointError, match=f"bytes {place // BLOCK * BLOCK} to"):
            file.read(place, place + 1, memoryview(bytearray(1)))


@pytest.mark.parametrize("row", [1, 12, 514, 1028, 2048, BLOCK, 40_000, 3 << 20])
def test_pieces_of_rows_end_at_block_boundaries(row):
    assert rows_at_once(row) * row % BLOCK == 0


def test_failed_fsync_fails_save_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SYNC_BYTES", 1 << 20)
    calls = []
    fsync = os.fsync

    def first_fails(handle):
        calls.append(handle)
        if len(calls) == 1:
            raise OSError("the disk is gone")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", first_fails)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        save(tmp_path / "c", {"w": torch.zeros(1 << 20)})
    assert os.listdir(tmp_path) == []


def test_gpu_tensor_without_dimensions_is_written():
    """The step count of a fused or capturable optimizer is one."""
    with fake_cuda(0), mock.patch.object(torch, "empty", _pinned):
        assert b"".join(pieces_of(torch.tensor(7.0).cuda())) == torch.tensor(7.0).numpy().tobytes()


def test_threads_use_the_stream_of_their_caller(monkeypatch):
    """A copy in the default stream would not wait for the optimizer's step in another one."""
    entered = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext(entered.append(one)))
    for place in (Path(), RemotePath("memory://store")):
        assert each(place, str, range(3), threads=2) == ["0", "1", "2"]
    assert entered == ["the caller's"] * 6


@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_gpu_rows_are_staged_in_two_pinned_buffers(rows, monkeypatch):
    """Each copy is synchronized before its buffer is read. Buffers have at least 32 MiB."""
    assert data_files._STAGED >= 32 * 2**20
    monkeypatch.setattr(data_files, "_STAGED", 2 * BLOCK)
    expected = torch.arange(rows * BLOCK // 8, dtype=torch.float64).view(rows, -1)
    made = []

    def pinned(*args, **kwargs):
        made.append(_pinned(*args, **kwargs))
        return made[-1]

    with fake_cuda(0) as waits:
        values = expected.to("cuda")
        waits.batches.append([])
        with mock.patch.object(torch, "empty", pinned):
            content = b"".join(bytes(piece) for piece in pieces_of(values))
    assert content == expected.numpy().tobytes()
    copies = -(-rows // 2)
    assert len(made) == min(2, copies)
    assert [wait.what for wait in waits.batches[-1]] == ["synchronize"] * copies
