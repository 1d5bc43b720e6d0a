"""Chunks on disk: litdata as a container that knows nothing of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from lightning_ptdp.data import StoreError
from lightning_ptdp.data.store import ChunkWriter, count_blocks, longest_block, open_blocks, token_dtype
from tests.pool import Pool


def write(folder: Path, runs: list[int], *, chunk_tokens: int, dtype: np.dtype) -> int:
    """Runs of consecutive numbers of these lengths."""
    writer = ChunkWriter(folder, chunk_tokens=chunk_tokens, dtype=dtype)
    start = 0
    for length in runs:
        writer.add(range(start, start + length))
        start += length
    writer.close()
    return writer.tokens


def check_written_and_read(rank: int, folder: str) -> tuple[int, int, list[str]]:
    """Write as one of several processes, each its own folder, and read every block."""
    own = Path(folder, str(rank))
    environment = dict(os.environ)
    written = write(own, [1, 250, 0, 80, 1000], chunk_tokens=100, dtype=np.dtype(np.uint16))
    reader = open_blocks(own, 30)
    # 13 chunks of 100 tokens and one of 31: three whole blocks a chunk, then one.
    blocks = [reader[number] for number in range(count_blocks(own, 30))]
    starts = [100 * chunk + 30 * block for chunk in range(13) for block in range(3)] + [1300]
    assert [block.tolist() for block in blocks] == [list(range(start, start + 30)) for start in starts]
    assert os.environ == environment
    return written, (dist.get_world_size() if dist.is_initialized() else 1), sorted(os.listdir(own))


def test_blocks_are_the_tokens_in_order(tmp_path: Path) -> None:
    written, _, files = check_written_and_read(0, str(tmp_path))
    assert written == 1331
    assert files == sorted([f"chunk-0-{number}.bin" for number in range(14)] + ["index.json"])
    assert longest_block(tmp_path / "0") == 100


@pytest.mark.parametrize("env", [{}, {"GLOBAL_RANK": "1", "NNODES": "2"}])
def test_litdata_sees_one_process_on_every_rank(pool: Pool, tmp_path: Path, env: dict[str, str]) -> None:
    # Under its own view of the world, rank 1 would name its files chunk-1-*.bin and wait for rank 0's index forever.
    results = pool.run(check_written_and_read, world_size=2, args=(str(tmp_path),), env=env)
    assert [world for _, world, _ in results] == [2, 2]
    assert results[0][2] == results[1][2]
    assert "chunk-0-0.bin" in results[1][2]


def test_equal_tokens_are_equal_files_however_they_come(tmp_path: Path) -> None:
    dtype = np.dtype(np.uint16)
    write(tmp_path / "a", [331], chunk_tokens=100, dtype=dtype)
    write(tmp_path / "b", [1] * 331, chunk_tokens=100, dtype=dtype)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("total", [99, 100, 101, 200])
def test_chunks_at_their_edges(tmp_path: Path, total: int) -> None:
    assert write(tmp_path / "x", [total], chunk_tokens=100, dtype=np.dtype(np.int32)) == total
    assert count_blocks(tmp_path / "x", 1) == total
    reader = open_blocks(tmp_path / "x", 1)
    assert [int(reader[number][0]) for number in range(total)] == list(range(total))


def test_a_big_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    assert token_dtype(65535) == np.uint16
    assert token_dtype(65536) == np.int32
    writer = ChunkWriter(tmp_path / "x", chunk_tokens=100, dtype=token_dtype(200_000))
    writer.add([0, 70_000, 199_999])
    writer.close()
    assert open_blocks(tmp_path / "x", 3)[0].tolist() == [0, 70_000, 199_999]


def test_nothing_written_and_damaged_indices(tmp_path: Path) -> None:
    assert write(tmp_path / "x", [0], chunk_tokens=100, dtype=np.dtype(np.uint16)) == 0
    assert not (tmp_path / "x").exists()
    with pytest.raises(StoreError, match=r"index\.json cannot be read"):
        count_blocks(tmp_path / "x", 3)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(StoreError, match=r"index\.json is damaged"):
        count_blocks(tmp_path, 3)
