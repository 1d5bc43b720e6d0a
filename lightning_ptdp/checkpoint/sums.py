"""Checksums of a data file, block by block, so that a part of it can be read and checked alone.

CRC-32 is the hash: it is in the standard library (zlib), runs at some GB/s on one core without holding the interpreter's lock (where
sha256 without special instructions runs at a tenth of that), and notices every damage that is confined to 32 bits and all but 2^-32
of any other. It is no defence against intent; nor is anything that lies beside the data.

``__0_0.distcp`` has its sums in ``__0_0.crc``: an array of (offset of the block, CRC-32 of it), both little-endian. A write of at least
a block's size, which is a tensor's values, begins a block of its own: a part of a tensor that begins at a round place is read without
what comes before it.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.errors import CheckpointError

__all__ = ["BLOCK", "DATA_SUFFIX", "SUMS_SUFFIX", "SummedFile", "open_summed", "parse_sums", "summing"]

BLOCK = 16 * 1024
DATA_SUFFIX, SUMS_SUFFIX = ".distcp", ".crc"
_ENTRY = np.dtype([("offset", "<u8"), ("crc", "<u4")])


class _SummingStream(io.RawIOBase):
    """Hands on what is written, and sums it up on its way."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._position = self._start = self._crc = 0
        self.sums: list[tuple[int, int]] = []

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(view) < BLOCK:
            self._crc = zlib.crc32(view, self._crc)
            self._position += len(view)
            if self._position - self._start >= BLOCK:
                self.end_block()
        else:
            self.end_block()
            for begin in range(0, len(view), BLOCK):
                block = view[begin : begin + BLOCK]
                self.sums.append((self._position + begin, zlib.crc32(block)))
            self._position = self._start = self._position + len(view)
        self._stream.write(view)
        return len(view)

    def end_block(self) -> None:
        """The next write begins a block."""
        if self._position > self._start:
            self.sums.append((self._start, self._crc))
        self._start, self._crc = self._position, 0

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """The file is closed by who opened it."""


@contextmanager
def summing(path: Path) -> Iterator[Any]:
    """A data file to write; its sums are written beside it when it is whole."""
    with files.open_synced(path) as stream:
        summed = _SummingStream(stream)
        yield summed
        summed.end_block()
    with files.open_synced(path.with_suffix(SUMS_SUFFIX)) as stream:
        stream.write(np.array(summed.sums, dtype=_ENTRY).tobytes())


def parse_sums(content: bytes) -> np.ndarray[Any, Any]:
    """The array in a ``.crc`` file: fields ``offset`` and ``crc``, ordered."""
    return np.frombuffer(content, dtype=_ENTRY)


class SummedFile:
    """A data file of which only what was checked is handed out."""

    def __init__(self, stream: io.FileIO, path: Path, sums: np.ndarray[Any, Any], size: int) -> None:
        self._stream, self._path, self._size = stream, path, size
        self._starts = np.append(sums["offset"], np.uint64(size)).astype(np.int64)
        self._crcs = sums["crc"].tolist()

    def block_end(self, position: int) -> int:
        """Where the block that holds byte ``position`` ends."""
        return int(self._starts[np.searchsorted(self._starts, position, side="right")])

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop); whole blocks are read and compared with their sums. The memory is the caller's, and writable.

        Raises:
            CheckpointError: The file is damaged there; names the file and the first bad byte's block.
        """
        if stop <= start:
            return memoryview(bytearray())
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop))
        begin, end = int(self._starts[first]), int(self._starts[last])
        content = memoryview(np.empty(end - begin, dtype=np.uint8).data)
        self._fill(content, begin)
        for number in range(first, last):
            one, other = int(self._starts[number]), int(self._starts[number + 1])
            if zlib.crc32(content[one - begin : other - begin]) != self._crcs[number]:
                raise CheckpointError(f"{self._path} is damaged: bytes {one} to {other} do not have the CRC-32 that was written")
        return content[start - begin : stop - begin]

    def check(self, *, step: int = 1 << 24) -> None:
        """Read and compare everything, ``step`` bytes at a time.

        Raises:
            CheckpointError: The file is damaged.
        """
        start = 0
        while start < self._size:
            stop = self.block_end(min(start + step, self._size) - 1)
            self.read(start, stop)
            start = stop

    def _fill(self, content: memoryview, begin: int) -> None:
        self._stream.seek(begin)
        done = 0
        while done < len(content):
            count = self._stream.readinto(content[done:])
            if not count:
                raise CheckpointError(f"{self._path} is damaged: it ends at byte {begin + done} instead of {self._size}")
            done += count


@contextmanager
def open_summed(path: Path, *, sums: bytes, size: int) -> Iterator[SummedFile]:
    """Open a data file of ``size`` bytes to be read with the content of its ``.crc`` file."""
    with open(path, "rb", buffering=0) as stream:
        yield SummedFile(stream, path, parse_sums(sums), size)
