"""Checksums of a data file, block by block, so that a part of it can be read and checked alone.

CRC-32 is the hash: it is in the standard library (zlib), runs at some GB/s on one core without
holding the interpreter's lock (where sha256 without special instructions runs at a tenth of that),
and notices every damage that is confined to 32 bits and all but 2^-32 of any other. It is no
defence against intent; nor is anything that lies beside the data.

``rank0-0.safetensors`` has its sums in ``rank0-0.crc``: an array of (offset of the block, CRC-32 of it),
both little-endian. The values of a tensor, if they are at least a block, begin a block of their
own: a part of a tensor that begins at a round place is read without what comes before it."""

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
    "BlockSums",
    "DATA_SUFFIX",
    "SUMS_SUFFIX",
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
# on average of a block: what is around the values of a tensor is more, and makes two blocks of
# three
_FEWEST_BYTES = 256


class SummingFile:
    """A data file that is being written, and the sums of its blocks."""

    def __init__(self, stream: IO[bytes], sync: files.EarlySync) -> None:
        self._stream, self._sync = stream, sync
        self.position = self._start = self._crc = 0
        self.sums: list[tuple[int, int]] = []

    def write(self, content: bytes | memoryview) -> None:
        """Append what is small; it shares a block with what is before and behind it."""
        self._crc = zlib.crc32(content, self._crc)
        self._stream.write(content)
        self.position += len(content)
        if self.position - self._start >= BLOCK:
            self.end_block()

    def write_blocks(self, pieces: Iterable[memoryview]) -> None:
        """Append the values of a tensor. The first piece begins a block, unless all of them are
        less than one.

        Args:
            pieces: All but the last are a multiple of BLOCK bytes.
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
        """The next write begins a block."""
        if self.position > self._start:
            self.sums.append((self._start, self._crc))
        self._start, self._crc = self.position, 0


@contextmanager
def summing(path: Path) -> Iterator[SummingFile]:
    """A data file to write; its sums are written beside it when it is whole."""
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
        starts: Where the blocks begin, and behind them the file's size; (n + 1) int64.
        crcs: Their CRC-32; (n) uint32.
    """

    starts: Array
    crcs: Array


def parse_sums(content: bytes, *, size: int) -> BlockSums:
    """The content of a ``.crc`` file, of a data file of ``size`` bytes.

    Raises:
        Misfit: It cannot be that file's: what is not in small blocks from its beginning to its end
            could not be checked piece by piece.
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
    """A data file of which only what was checked is handed out.

    Attributes:
        path: The file.
        size: Of it in bytes.
    """

    def __init__(self, stream: io.FileIO, path: Path, sums: BlockSums) -> None:
        self._stream, self.path, self.size = stream, path, int(sums.starts[-1])
        self._starts, self._crcs = sums.starts, sums.crcs
        self._scratch = np.empty(0, dtype=np.uint8)

    def block_end(self, position: int) -> int:
        """Return the end of the block that holds byte ``position``."""
        return int(self._starts[np.searchsorted(self._starts, position, side="right")])

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """Bytes [start, stop); whole blocks are read and compared with their sums.

        Args:
            start: First byte.
            stop: Behind the last byte.
            into: Memory of that many bytes, which is read into and returned if they are whole
                blocks. Otherwise what is returned is used again by the next call.

        Raises:
            CheckpointError: The file is damaged there, or ends before; names the file and the first
                bad byte's block.
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
        """Read and compare everything, ``step`` bytes at a time.

        Raises:
            CheckpointError: The file is damaged.
        """
        start = 0
        while start < self.size:
            stop = self.block_end(min(start + step, self.size) - 1)
            self.read(start, stop)
            start = stop

    def _memory(self, size: int) -> memoryview:
        """The same for every read: what is still in the processor's cache is faster than what is
        fresh."""
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
    """Open a data file to be read with its sums."""
    with open(path, "rb", buffering=0) as stream:
        yield SummedFile(stream, path, sums)
