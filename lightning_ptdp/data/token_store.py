"""Token store: litdata chunks, written by this process and read by block number.

litdata is used only as a container. By default its writer names files by rank; environment
variables that declare a single process prevent this while the writer is created. litdata's reader
is not used: it shards by *global* rank, which differs between tensor- and pipeline-parallel peers
of one replica, and it trusts the index without checks.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from lightning_ptdp.base.untrusted import inside, read_json
from lightning_ptdp.data.data_error import StoreError, reading

LearnedTokens: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Ids of tokens, and a mask of those that are learned."""
INDEX_FILE = "index.json"
TokenType = Literal["uint16", "int32"]
# Number of items (one), position of its first byte and position after its last, four bytes each;
# then the tokens.
_HEADER_BYTES = 12
_FIRST = 1 << 30
_LEARNED = 1 << 29
MARKS = _FIRST | _LEARNED
"""Bits of a token in a store of conversations: it begins a sample, it is learned."""
CHUNK_TOKENS = 1 << 22
"""Usual number of tokens of a chunk."""
_MOST_TOKENS = 1 << 30  # of a chunk, because the format stores byte positions in four bytes
_CHECKED = 1 << 22  # tokens at a time
_MAPPED = 64  # chunks at a time: each needs an open file
# Environment in which litdata sees a single process.
_ALONE = {
    "DATA_OPTIMIZER_GLOBAL_RANK": "0",
    "DATA_OPTIMIZER_NUM_WORKERS": "1",
    "DATA_OPTIMIZER_NUM_NODES": "1",
}


def token_dtype(vocabulary_size: int) -> TokenType:
    """Return the dtype of stored tokens: two bytes if the vocabulary allows it, else four."""
    return "uint16" if vocabulary_size <= 65535 else "int32"


def mark_sample(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Return the ids of a conversation with their marks, int32."""
    tokens = np.where(learned, ids | _LEARNED, ids).astype(np.int32)
    tokens[:1] |= _FIRST
    return tokens


def unmark(tokens: np.ndarray) -> LearnedTokens:
    """Return the ids of marked tokens, int32, and a mask of the learned ones."""
    return tokens & ~MARKS, (tokens & _LEARNED) != 0


def sample_starts(tokens: np.ndarray) -> np.ndarray:
    """Return the positions of marked tokens that begin a sample, int64."""
    return np.flatnonzero(tokens >= _FIRST)  # the highest bit: half a second per 10^9 tokens


def write_chunks(
    folder: str | Path,
    runs: Iterable[Sequence[int] | np.ndarray],
    *,
    chunk_tokens: int,
    dtype: TokenType,
) -> int:
    """Write runs of tokens, joined, as chunks, and return the number of tokens.

    All chunks have ``chunk_tokens`` tokens, except for a shorter last one. Equal tokens produce
    equal bytes. The folder appears with the first chunk.
    """
    from unittest.mock import patch

    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = None
    total = 0
    for number, chunk in enumerate(_joined(runs, chunk_tokens, dtype)):
        if writer is None:
            with patch.dict(os.environ, _ALONE):
                writer = BinaryWriter(
                    str(folder), chunk_size=chunk_tokens, item_loader=TokensLoader()
                )
                assert writer.rank == 0, "litdata believes in other writers"
        # One item per chunk: litdata closes a chunk when the next item does not fit.
        writer[number] = chunk
        total += len(chunk)
    if writer is not None:
        writer.done()
        writer.merge()
        _settle_index(Path(folder, INDEX_FILE))
    return total


def _joined(
    runs: Iterable[Sequence[int] | np.ndarray], size: int, dtype: TokenType
) -> Iterator[np.ndarray]:
    pending: list[np.ndarray] = []
    tokens = 0
    for run in runs:
        pending.append(np.asarray(run, dtype))
        tokens += len(run)
        if tokens >= size:
            joined = np.concatenate(pending)
            cut = tokens // size * size
            yield from (joined[start : start + size] for start in range(0, cut, size))
            pending = [joined[cut:]]
            tokens -= cut
    if tokens:
        yield np.concatenate(pending)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens in a file.

    Attributes:
        path: Path of the file.
        tokens: Number of tokens.
        dtype: numpy's name of the type of a token.
        offset: First byte of the tokens.
    """

    path: Path
    tokens: int
    dtype: str
    offset: int = _HEADER_BYTES


def read_chunks(folder: str | Path, dtype: TokenType) -> tuple[Chunk, ...]:
    """Return the chunks in the index of a split, in the order of writing.

    Each chunk must exist inside the folder with the right size.

    Raises:
        StoreError: The index or a chunk is missing or damaged.
    """
    path = Path(folder, INDEX_FILE)
    width = np.dtype(dtype).itemsize
    chunks = []
    with reading(path, StoreError, "Prepare the data again with overwrite"):
        for entry in read_json(path)["chunks"]:
            file = inside(folder, entry["filename"])
            tokens = entry["dim"]
            if type(tokens) is not int or not 0 < tokens <= _MOST_TOKENS:
                raise ValueError("a chunk has an invalid number of tokens")
            info = file.stat()
            size = _HEADER_BYTES + tokens * width
            if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise ValueError(f"{file} has {info.st_size} bytes, but must have {size}")
            chunks.append(Chunk(file, tokens, dtype))
    return tuple(chunks)


@dataclass(eq=False)
class ChunkMap:
    """Random access to the tokens of chunks, in blocks of ``block_size``.

    A block never spans two chunks. Only a few chunks are mapped into memory at a time.

    Args:
        chunks: Chunks of a split, in the order of writing.
        vocabulary_size: Number of ids; every token that is read is checked against it.
        block_size: Tokens of a block. The tokens of a chunk that do not fill a block are left out.
        marks: Bits of a stored token that are not part of its id.

    Raises:
        StoreError: While reading: a chunk cannot be read, or a token is outside the vocabulary.
    """

    chunks: Sequence[Chunk]
    _: KW_ONLY
    vocabulary_size: int
    block_size: int = 1
    marks: int = 0

    def __post_init__(self) -> None:
        self._sizes = np.array([chunk.tokens // self.block_size for chunk in self.chunks], np.int64)
        self._ends = np.cumsum(self._sizes)
        self._map = lru_cache(_MAPPED)(self._open)

    def __reduce__(self) -> tuple[partial[ChunkMap], tuple[()]]:
        """Pickle only the arguments; the copy maps the chunks again."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        return partial(ChunkMap, **arguments), ()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the stored tokens of every chunk."""
        return map(self._open, range(len(self.chunks)))

    def read(self, start: int, count: int = 1) -> np.ndarray:
        """Return ``count`` blocks from block ``start`` on; 1-D, int32, with their marks.

        Blocks are counted over all chunks.
        """
        parts = []
        stop = start + count
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[number])
            first = end - int(self._sizes[number])
            part_end = min(stop, end)
            span = slice((start - first) * self.block_size, (part_end - first) * self.block_size)
            tokens = self._map(number)[span]
            self._check(tokens, number)
            parts.append(tokens.astype(np.int32))
            start = part_end
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def check(self) -> None:
        """Read all tokens once and compare them with the vocabulary.

        Raises:
            StoreError: A token is outside the vocabulary.
        """
        for number, tokens in enumerate(self):
            for start in range(0, len(tokens), _CHECKED):
                self._check(tokens[start : start + _CHECKED], number)

    def _check(self, tokens: np.ndarray, number: int) -> None:
        ids = tokens.astype(np.int64) & ~self.marks
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < self.vocabulary_size:
                raise StoreError(
                    f"{self.chunks[number].path} has token {token}, but "
                    f"vocabulary_size={self.vocabulary_size}. Give the size of the tokenizer "
                    "that produced the tokens, or prepare the data again with overwrite"
                )

    def _open(self, number: int) -> np.ndarray:
        chunk = self.chunks[number]
        try:
            return np.memmap(chunk.path, chunk.dtype, "r", chunk.offset, (chunk.tokens,))
        except (OSError, ValueError) as error:
            raise StoreError(f"{chunk.path} cannot be read: {error}") from error


def _settle_index(path: Path) -> None:
    """Remove the time of writing from the index, so that equal data give equal files."""
    index = json.loads(path.read_text("utf-8"))
    index["updated_at"] = "0"
    path.write_text(json.dumps(index, sort_keys=True) + "\n", "utf-8")
