"""Checksums of the blocks of a data file, so that any part can be read and checked alone.

The hash is CRC-32. It is in the standard library (zlib), and runs at some GB/s on one core without
the interpreter's lock; sha256 without special instructions runs at a tenth of that. It detects
every damage that is confined to 32 bits, and all but 2^-32 of any other. It does not protect
against intent, and neither does anything else that is stored beside the data.

The sums of ``rank0-0.safetensors`` are in ``rank0-0.crc``: an array of (offset of the block, CRC-32
of it), both little-endian. The values of a tensor of at least one block begin a new block. A part
of a tensor that begins at a multiple of the block size is therefore read without the bytes before
it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.checkpoint_error import CheckpointError

__all__ = [
    "BLOCK",
    "DATA_SUFFIX",
    "SUMS_SUFFIX",
    "BlockSums",
    "SummedFile",
    "SummingFile",
    "most_sums_bytes",
    "open_summed",
    "parse_sums",
    "summing",
]

BLOCK = 16 * 1024
DATA_SUFFIX, SUMS_SUFFIX = ".safetensors", ".crc"
Array = np.ndarray[Any, Any]
_ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4")])
_MOST_BLOCK = 4 * BLOCK
# Lower bound of the average number of bytes in a block. The archive's bytes around a tensor's
# values are more than this, and they are two of every three blocks.
_FEWEST_BYTES = 256


class SummingFile:
    """A data file that is being written, with the sums of its blocks."""

    def __init__(self, stream: IO[bytes], sync: files.EarlySync) -> None:
        self._stream, self._sync = stream, sync
        self.position = self._start = self._crc = 0
        self.sums: list[tuple[int, int]] = []

    def write(self, content: bytes | memoryview) -> None:
        """Append a few bytes, which share a block with the bytes before and after them."""
        self._crc = zlib.crc32(content, self._crc)
        self._stream.write(content)
        self.position += len(content)
        if self.position - self._start >= BLOCK:
            self.end_block()

    def write_blocks(self, pieces: Iterable[memoryview]) -> None:
        """Append the values of a tensor.

        The first piece begins a block, unless all pieces together are smaller than a block.

        Args:
            pieces: Pieces of the values. All but the last are a multiple of BLOCK bytes.
        """
        for piece in pieces:
            if len(piece) < BLOCK:
                self.write(piece)
                continue
            self.end_block()
            for begin in range(0, len(piece), BLOCK):
                self.sums.append((self.position + begin, zlib.crc32(piece[begin : begin + BLOCK])))
            self._stream.write(piece)
            self.position = self._start = self.position + len(piece)
            self._sync.reached(self.position)

    def end_block(self) -> None:
        """End the current block, so that the next write begins a new one."""
        if self.position > self._start:
            self.sums.append((self._start, self._crc))
        self._start, self._crc = self.position, 0


@contextmanager
def summing(path: Path) -> Iterator[SummingFile]:
    """Return a context with a data file to write; its sums are written beside it at the end."""
    with files.open_synced(path) as stream, closing(files.EarlySync(stream)) as sync:
        file = SummingFile(stream, sync)
        yield file
        file.end_block()
        sync.wait()
    with files.open_synced(path.with_suffix(SUMS_SUFFIX)) as stream:
        stream.write(np.array(file.sums, dtype=_ENTRY).tobytes())


@dataclass(frozen=True, kw_only=True)
class BlockSums:
    """Content of ``rank0-0.crc`` for a file of n blocks.

    Attributes:
        starts: Positions at which the blocks begin, and the size of the file; (n + 1) int64.
        crcs: CRC-32 of the blocks; (n) uint32.
    """

    starts: Array
    crcs: Array


def parse_sums(content: bytes, *, size: int) -> BlockSums:
    """Return the content of a ``.crc`` file, for a data file of ``size`` bytes.

    Raises:
        Misfit: The content does not belong to that file. Its blocks must be small and cover the
            file from its beginning to its end, so that every part can be checked.
    """
    if len(content) % _ENTRY.itemsize:
        raise Misfit(f"has {len(content)} bytes, which are not whole entries")
    entries = np.frombuffer(content, dtype=_ENTRY)
    starts = entries["offset"]
    if size == 0 and not len(starts):
        return BlockSums(starts=np.zeros(1, dtype=np.int64), crcs=entries["crc"])
    if (
        not len(starts)
        or starts[0] != 0
        or starts[-1] >= size
        or not (starts[1:] > starts[:-1]).all()
    ):
        raise Misfit(
            f"does not list the blocks of a file of {size} bytes from its beginning to its end"
        )
    if (longest := int(np.diff(starts, append=np.uint64(size)).max())) > _MOST_BLOCK:
        raise Misfit(f"lists a block of {longest} bytes; no block has more than {_MOST_BLOCK}")
    return BlockSums(
        starts=np.append(entries["offset"], np.uint64(size)).astype(np.int64), crcs=entries["crc"]
    )


def most_sums_bytes(size: int) -> int:
    """Return the largest possible size of the ``.crc`` file of a data file of ``size`` bytes."""
    return (size // _FEWEST_BYTES + 1) * _ENTRY.itemsize


class SummedFile:
    """A data file that returns only checked bytes.

    Attributes:
        path: The file.
        size: Size of the file in bytes.
    """

    def __init__(self, stream: io.FileIO, path: Path, sums: BlockSums) -> None:
        self._stream, self.path, self.size = stream, path, int(sums.starts[-1])
        self._starts, self._crcs = sums.starts, sums.crcs
        self._scratch = np.empty(0, dtype=np.uint8)

    def block_end(self, position: int) -> int:
        """Return the end of the block that holds byte ``position``."""
        return int(self._starts[np.searchsorted(self._starts, position, side="right")])

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """Return the bytes [start, stop); whole blocks are read and compared with their sums.

        Args:
            start: First byte.
            stop: Byte after the last one.
            into: Memory of that many bytes. If the range consists of whole blocks, they are read
                into this memory, which is returned. Otherwise the next call reuses the returned
                memory.

        Raises:
            CheckpointError: The file is damaged in this range, or too short. The message names the
                file and the first damaged block.
        """
        if not 0 <= start <= stop <= self.size:
            raise CheckpointError(
                f"{self.path} is damaged: bytes {start} to {stop} would be in it, but it has "
                f"{self.size}"
            )
        if stop == start:
            return memoryview(bytearray())
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop))
        begin, end = int(self._starts[first]), int(self._starts[last])
        content = (
            into
            if into is not None and (begin, end) == (start, stop)
            else self._memory(end - begin)
        )
        self._fill(content, begin)
        bounds = self._starts[first : last + 1].tolist()
        for one, other, crc in zip(
            bounds, bounds[1:], self._crcs[first:last].tolist(), strict=False
        ):
            if zlib.crc32(content[one - begin : other - begin]) != crc:
                raise CheckpointError(
                    f"{self.path} is damaged: bytes {one} to {other} do not have the CRC-32 that "
                    "was written"
                )
        return content if content is into else content[start - begin : stop - begin]

    def check(self, *, step: int = 1 << 20) -> None:
        """Read and compare the whole file, ``step`` bytes at a time.

        Raises:
            CheckpointError: The file is damaged.
        """
        start = 0
        while start < self.size:
            stop = self.block_end(min(start + step, self.size) - 1)
            self.read(start, stop)
            start = stop

    def _memory(self, size: int) -> memoryview:
        """Return ``size`` bytes of the same memory for every read.

        This memory is faster than new memory while it is in the processor's cache.
        """
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch.data[:size]

    def _fill(self, content: memoryview, begin: int) -> None:
        self._stream.seek(begin)
        done = 0
        while done < len(content):
            count = self._stream.readinto(content[done:])
            if not count:
                raise CheckpointError(
                    f"{self.path} is damaged: it ends at byte {begin + done} instead of {self.size}"
                )
            done += count


@contextmanager
def open_summed(path: Path, sums: BlockSums) -> Iterator[SummedFile]:
    """Return a context with a data file to read and compare with its sums."""
    with open(path, "rb", buffering=0) as stream:
        yield SummedFile(stream, path, sums)
