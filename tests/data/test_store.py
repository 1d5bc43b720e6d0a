"""Chunks of tokens on disk, written by litdata independently of ranks."""

import json
import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from lightning_ptdp.data import StoreError, prepare, verify_store
from lightning_ptdp.data.manifest import record_files
from lightning_ptdp.data.token_store import (
    MARKS,
    ChunkMap,
    mark_sample,
    read_chunks,
    sample_starts,
    token_dtype,
    unmark,
    write_chunks,
)
from tests.data.conftest import config_of, write_corpus


def write(folder, runs, *, chunk_tokens, dtype):
    """Write runs of consecutive numbers of the given lengths."""
    starts = accumulate(runs, initial=0)
    numbers = [range(start, start + length) for start, length in zip(starts, runs, strict=False)]
    return write_chunks(folder, numbers, chunk_tokens=chunk_tokens, dtype=dtype)


def mapped(folder, dtype, vocabulary_size, **options):
    return ChunkMap(read_chunks(folder, dtype), vocabulary_size=vocabulary_size, **options)


def check_written_and_read(rank, folder):
    """Write one folder per rank and check every block read from it."""
    own = Path(folder, str(rank))
    environment = dict(os.environ)
    written = write(own, [1, 250, 0, 80, 1000], chunk_tokens=100, dtype="uint16")
    reader = mapped(own, "uint16", 1331, block_size=30)
    # 13 chunks of 100 tokens with three whole blocks each, and one of 31 tokens with one block.
    blocks = [reader.read(number) for number in range(len(reader))]
    starts = [100 * chunk + 30 * block for chunk in range(13) for block in range(3)] + [1300]
    assert [block.tolist() for block in blocks] == [
        list(range(start, start + 30)) for start in starts
    ]
    assert os.environ == environment
    return written, (dist.get_world_size() if dist.is_initialized() else 1), sorted(os.listdir(own))


def test_blocks_are_read_in_order(tmp_path):
    written, _, files = check_written_and_read(0, str(tmp_path))
    assert written == 1331
    assert files == sorted([f"chunk-0-{number}.bin" for number in range(14)] + ["index.json"])
    assert [chunk.tokens for chunk in read_chunks(tmp_path / "0", "uint16")] == [100] * 13 + [31]


@pytest.mark.parametrize("env", [{}, {"GLOBAL_RANK": "1", "NNODES": "2"}])
def test_litdata_sees_single_process_on_every_rank(pool, tmp_path, env):
    # If litdata saw all ranks, rank 1 would name its files chunk-1-*.bin and wait forever for the
    # index of rank 0.
    results = pool.run(check_written_and_read, world_size=2, args=(str(tmp_path),), env=env)
    assert [world for _, world, _ in results] == [2, 2]
    assert results[0][2] == results[1][2]
    assert "chunk-0-0.bin" in results[1][2]


def test_files_are_independent_of_run_lengths(tmp_path):
    dtype = "uint16"
    write(tmp_path / "a", [331], chunk_tokens=100, dtype=dtype)
    write(tmp_path / "b", [1] * 331, chunk_tokens=100, dtype=dtype)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("total", [99, 100, 101, 200])
def test_token_counts_near_chunk_size_are_read_back(tmp_path, total):
    assert write(tmp_path / "x", [total], chunk_tokens=100, dtype="int32") == total
    reader = mapped(tmp_path / "x", "int32", total)
    assert [int(reader.read(number)[0]) for number in range(len(reader))] == list(range(total))


def test_large_vocabulary_uses_four_bytes(tmp_path):
    assert token_dtype(65535) == "uint16"
    assert token_dtype(65536) == "int32"
    write_chunks(
        tmp_path / "x", [[0, 70_000, 199_999]], chunk_tokens=100, dtype=token_dtype(200_000)
    )
    assert mapped(tmp_path / "x", "int32", 200_000).read(0, 3).tolist() == [0, 70_000, 199_999]
    with pytest.raises(
        StoreError, match=r"chunk-0-0\.bin has token 199999, but vocabulary_size=199999"
    ):
        mapped(tmp_path / "x", "int32", 199_999).read(0, 3)


def test_read_may_span_chunks(tmp_path):
    write(tmp_path / "x", [331], chunk_tokens=100, dtype="uint16")
    reader = mapped(tmp_path / "x", "uint16", 331)
    for start, count in ((0, 331), (99, 2), (100, 100), (95, 220), (330, 1)):
        assert reader.read(start, count).tolist() == list(range(start, start + count))


def test_marks_are_separate_from_token_ids(tmp_path):
    samples = [([5, 6, 7], [0, 0, 1]), ([8, 9], [1, 1]), ([3, 4, 2], [0, 1, 0])]
    marked = [mark_sample(np.array(ids), np.array(learned, bool)) for ids, learned in samples]
    write_chunks(tmp_path / "x", marked, chunk_tokens=4, dtype="int32")
    reader = mapped(tmp_path / "x", "int32", 10, marks=MARKS)
    reader.check()
    tokens = reader.read(0, 8)
    assert sample_starts(tokens).tolist() == [0, 3, 5]
    ids, learned = unmark(tokens)
    assert ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 2]
    assert learned.tolist() == [False, False, True, True, True, False, True, False]
    with pytest.raises(StoreError, match="has token 9, but vocabulary_size=9"):
        mapped(tmp_path / "x", "int32", 9, marks=MARKS).check()
    with pytest.raises(StoreError, match="but vocabulary_size=10"):
        mapped(tmp_path / "x", "int32", 10).check()


def test_empty_store_has_no_index(tmp_path):
    assert write(tmp_path / "x", [0], chunk_tokens=100, dtype="uint16") == 0
    assert not (tmp_path / "x").exists()
    with pytest.raises(StoreError, match=r"index\.json cannot be read"):
        read_chunks(tmp_path / "x", "uint16")


def rewritten(text):
    return lambda folder: (folder / "index.json").write_text(text)


def changed(key, value):
    """Return a function that changes a field of the first chunk in the index."""

    def change(folder):
        index = json.loads((folder / "index.json").read_text())
        index["chunks"][0][key] = value
        (folder / "index.json").write_text(json.dumps(index))

    return change


def link_chunk(folder):
    (folder / "chunk-0-0.bin").rename(folder.parent / "outside.bin")
    (folder / "chunk-0-0.bin").symlink_to(folder.parent / "outside.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (rewritten("{"), "not valid JSON"),
        (rewritten("[]"), "TypeError"),
        (rewritten("[" * 10**6), "damaged"),
        (rewritten('{"chunks": [{"filename": "chunk-0-0.bin"}]}'), "dim"),
        *(
            (changed("filename", name), "not the name of a file inside")
            for name in ("../outside.bin", "/etc/passwd")
        ),
        (changed("filename", "gone.bin"), "cannot be read"),
        (link_chunk, "is a link"),
        *((changed("dim", tokens), "but must have") for tokens in (10**8, 99)),
        *(
            (changed("dim", tokens), "invalid number of tokens")
            for tokens in (10**13, -1, True, "100", 1e999)
        ),
    ],
)
def test_damaged_or_inconsistent_index_is_refused(tmp_path, damage, words):
    folder = tmp_path / "x"
    write(folder, [250], chunk_tokens=100, dtype="uint16")
    damage(folder)
    with pytest.raises(StoreError, match=words):
        read_chunks(folder, "uint16")


def test_number_of_open_files_is_bounded(tmp_path):
    write(tmp_path / "x", [300], chunk_tokens=2, dtype="uint16")
    before = len(os.listdir("/proc/self/fd"))
    reader = mapped(tmp_path / "x", "uint16", 300)
    assert [int(reader.read(number)[0]) for number in range(300)] == list(range(300))
    assert len(os.listdir("/proc/self/fd")) - before < 100
    assert np.concatenate(list(reader)).tolist() == list(range(300))


def test_verification_finds_token_outside_vocabulary(tmp_path):
    corpus = write_corpus(tmp_path / "text", documents=12)
    settings = {"vocabulary_size": 300, "validation_fraction": 0.2}
    made = prepare(config_of(corpus, tmp_path / "store", **settings))
    chunk = made.folder / "train" / "chunk-0-0.bin"
    content = bytearray(chunk.read_bytes())
    content[-2:] = (300).to_bytes(2, "little")
    chunk.write_bytes(content)
    replace(made.manifest, files=record_files(made.folder)).write(made.folder)
    with pytest.raises(StoreError, match=r"chunk-0-0\.bin has token 300, but vocabulary_size=300"):
        verify_store(made.folder)
    # Without hashes, as in every process: tokens are checked when they are read.
    verify_store(made.folder, hashes=False)
