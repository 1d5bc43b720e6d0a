"""Tokens on disk: litdata chunks, written in this process and read by block number.

litdata is used as a container only. It would shard what it reads by *global* rank, which differs between tensor- and
pipeline-parallel peers of one replica, and name what it writes by rank; both are switched off by telling it, while its objects
are made, that this process is alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_ptdp.data.errors import StoreError

__all__ = ["BlockReader", "ChunkMap", "ChunkWriter", "count_blocks", "longest_block", "open_blocks", "token_dtype"]

INDEX_FILE = "index.json"
_ALONE = {"DATA_OPTIMIZER_GLOBAL_RANK": "0", "DATA_OPTIMIZER_NUM_WORKERS": "1", "DATA_OPTIMIZER_NUM_NODES": "1"}


class BlockReader(Protocol):
    """Random access to blocks of tokens."""

    def __getitem__(self, index: int) -> np.ndarray: ...


def token_dtype(vocabulary_size: int) -> np.dtype:
    """How a token is stored: two bytes where the vocabulary allows it, else four."""
    return np.dtype(np.uint16 if vocabulary_size <= 65535 else np.int32)


class ChunkWriter:
    """Writes runs of tokens, joined, as chunks of ``chunk_tokens`` tokens (the last one shorter); the same bytes every time.

    The folder appears with the first chunk; ``tokens`` counts what was added.
    """

    def __init__(self, folder: str | Path, *, chunk_tokens: int, dtype: np.dtype) -> None:
        self.tokens = 0
        self._folder = Path(folder)
        self._size = chunk_tokens
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []
        self._waiting_tokens = 0
        self._chunks = 0
        self._writer: Any = None

    def add(self, run: Sequence[int] | np.ndarray) -> None:
        """Append a run of tokens, 1-D."""
        self._waiting.append(np.asarray(run, self._dtype))
        self._waiting_tokens += len(run)
        self.tokens += len(run)
        if self._waiting_tokens >= self._size:
            self._flush(self._waiting_tokens // self._size * self._size)

    def close(self) -> None:
        """Write what is left, and the index."""
        if self._waiting_tokens:
            self._flush(self._waiting_tokens)
        if self._writer is not None:
            self._writer.done()
            self._writer.merge()
            _settle_index(self._folder / INDEX_FILE)

    def _flush(self, length: int) -> None:
        joined = np.concatenate(self._waiting)
        for start in range(0, length, self._size):
            self._write(joined[start : min(start + self._size, length)])
        self._waiting, self._waiting_tokens = [joined[length:]], len(joined) - length

    def _write(self, chunk: np.ndarray) -> None:
        from litdata import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        if self._writer is None:
            with _alone():
                self._writer = BinaryWriter(str(self._folder), chunk_size=self._size, item_loader=TokensLoader())
                assert self._writer.rank == 0, "litdata believes in other writers"
        # One item a chunk: litdata closes a chunk when the next item does not fit.
        self._writer[self._chunks] = chunk
        self._chunks += 1


class ChunkMap:
    """The chunks as arrays over the mapped files, for reading runs of any length.

    Args:
        folder: A split's folder.
        dtype: How a token is stored.

    Attributes:
        chunks: One array a chunk, in the order of writing.

    Raises:
        StoreError: The index or a chunk is missing or damaged.
    """

    def __init__(self, folder: str | Path, dtype: np.dtype) -> None:
        index = _read_index(folder)
        try:
            # A chunk is its number of items (one), that many offsets and one more, four bytes each, and then the tokens.
            self.chunks = [
                np.memmap(Path(folder, chunk["filename"]), dtype, "r", offset=12, shape=(int(chunk["dim"]),))
                for chunk in index["chunks"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{folder} cannot be read: {error!r}; prepare the data again with overwrite") from error
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks])

    def read(self, start: int, length: int) -> np.ndarray:
        """``length`` tokens of one chunk from token ``start`` on, counted over all chunks; int32."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        begin = start - (int(self._ends[number - 1]) if number else 0)
        assert begin + length <= len(self.chunks[number]), "a run never spans two chunks"
        return self.chunks[number][begin : begin + length].astype(np.int32)


def count_blocks(folder: str | Path, block_size: int) -> int:
    """How many blocks of ``block_size`` tokens the chunks hold; a block never spans two chunks."""
    return sum(dim // block_size for dim in _chunk_tokens(folder))


def longest_block(folder: str | Path) -> int:
    """Tokens of the longest chunk."""
    return max(_chunk_tokens(folder), default=0)


def open_blocks(folder: str | Path, block_size: int) -> BlockReader:
    """Open chunks for random access by block number, 0 to ``count_blocks - 1``, in the order of writing."""
    from litdata import StreamingDataset, TokensLoader

    with _alone():
        # Absolute, because litdata takes some relative paths for addresses.
        reader: BlockReader = StreamingDataset(
            str(Path(folder).resolve()), item_loader=TokensLoader(block_size=block_size), shuffle=False, drop_last=False
        )
    return reader


@contextmanager
def _alone() -> Iterator[None]:
    """Let litdata objects that are made inside see one process, whatever the real world is."""
    before = {name: os.environ.get(name) for name in _ALONE}
    os.environ.update(_ALONE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _settle_index(path: Path) -> None:
    """Take the time of writing out of the index, so that equal data are equal files."""
    index = json.loads(path.read_text("utf-8"))
    index["updated_at"] = "0"
    path.write_text(json.dumps(index, sort_keys=True) + "\n", "utf-8")


def _chunk_tokens(folder: str | Path) -> list[int]:
    try:
        return [int(chunk["dim"]) for chunk in _read_index(folder)["chunks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{Path(folder, INDEX_FILE)} is damaged: {error!r}") from error


def _read_index(folder: str | Path) -> Any:
    path = Path(folder, INDEX_FILE)
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error!r}") from error
