"""Tensors written in pieces: torch reads them, the blocks' sums are those of the bytes, and they
reach the disk."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_ptdp.checkpoint import CheckpointError, files, save_checkpoint
from lightning_ptdp.checkpoint.archive import rows_at_once, write_archive
from lightning_ptdp.checkpoint.checksums import BLOCK, BlockSums, open_summed, parse_sums, summing
from lightning_ptdp.checkpoint.stored_tensor import read_rectangle
from lightning_ptdp.parameters.sharding import Sharding

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous, many pieces": lambda: torch.randn(700, 1024),
    "columns": lambda: torch.randn(3000, 600)[:, 100:357],
    "transposed": lambda: torch.randn(300, 500).t(),
    "every other": lambda: torch.arange(100_000)[::2],
    "bf16 columns of three dimensions": lambda: torch.randn(40, 50, 64).bfloat16()[:, 5:, 3:40],
    "float8": lambda: torch.randn(200, 200).to(torch.float8_e4m3fn),
    "broadcast": lambda: torch.ones(1, 5000).expand(30, 5000),
    "bools": lambda: torch.randn(9) > 0,
    "number": lambda: torch.tensor(2.5, dtype=torch.float64),
    "nothing": lambda: torch.zeros(0, 7),
    "no columns": lambda: torch.zeros(5, 0),
}


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, tuple[torch.Tensor, int, int, int]]]:
    """All of them in one file, and one shape twice: name -> (tensor, position, position of its
    values, length)."""
    path, found = tmp_path_factory.mktemp("archive") / "x.distcp", {}
    with summing(path) as file:
        for name in (*TENSORS, "transposed"):
            tensor = TENSORS[name]()
            found[name] = (tensor, *write_archive(file, tensor))
    return path, found


def _sums(path: Path) -> BlockSums:
    return parse_sums(path.with_suffix(".crc").read_bytes(), size=path.stat().st_size)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_and_we_read_the_same(
    written: tuple[Path, dict[str, tuple[torch.Tensor, int, int, int]]], name: str
) -> None:
    path, (tensor, position, begin, length) = written[0], written[1][name]
    found = torch.load(
        io.BytesIO(path.read_bytes()[position : position + length]), weights_only=True
    )
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert (
        torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))
        if tensor.dim()
        else found == tensor
    )
    assert found.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    target = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    with open_summed(path, _sums(path)) as file:
        read_rectangle(
            file,
            target,
            begin=begin,
            dtype=tensor.dtype,
            shape=tensor.shape,
            offset=(0,) * tensor.dim(),
        )
    assert (
        torch.equal(target.view(torch.uint8), found.view(torch.uint8))
        if tensor.dim()
        else target == tensor
    )


def test_the_sums_are_those_of_the_bytes(
    written: tuple[Path, dict[str, tuple[torch.Tensor, int, int, int]]],
) -> None:
    content, sums = written[0].read_bytes(), _sums(written[0])
    starts = sums.starts.tolist()
    assert (starts[0], starts[-1], len(starts)) == (0, len(content), len(sums.crcs) + 1)
    for begin, end, crc in zip(starts, starts[1:], sums.crcs.tolist(), strict=False):
        assert 0 < end - begin < 2 * BLOCK
        assert zlib.crc32(content[begin:end]) == crc


@pytest.mark.parametrize("row", [1, 12, 514, 1028, 2048, BLOCK, 40_000, 3 << 20])
def test_pieces_of_rows_end_where_blocks_do(row: int) -> None:
    assert rows_at_once(row) * row % BLOCK == 0


def test_a_disk_that_fails_while_a_file_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SYNC_BYTES", 1 << 20)
    calls: list[int] = []
    fsync = os.fsync

    def first_fails(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError("the disk is gone")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", first_fails)
    tensors = {"model/w": (torch.zeros(1 << 20), Sharding.replicated((1 << 20,)))}
    with pytest.raises(CheckpointError, match="the disk is gone"):
        save_checkpoint(tmp_path / "c", tensors=tensors, state={}, metadata={})
    assert os.listdir(tmp_path) == []
