"""Checksums of the blocks of a data file, so that any part can be read and checked alone.

The hash is CRC-32, as in the standard library. zlib-ng computes it at 7 GB/s on one core without
the interpreter's lock, zlib at a quarter of that, and sha256 without special instructions is slower
still. It detects any damage that is confined to 32 bits, and misses a fraction of 2^-32 of all
other damage. It does not protect against deliberate changes. Nothing that is stored beside the data
does.

The sums of ``rank0-0.safetensors`` are in ``rank0-0.crc``: the CRC-32 of each 16 KiB of the file,
little-endian. The file's large tensors begin where a block begins, so that they are read without
the bytes before them."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from zlib_ng import zlib_ng

from lightning_ptdp.base.checked_json import Misfit
from lightning_ptdp.checkpoint import files
from lightning_ptdp.checkpoint.remote_path import Place, RemotePath
from lightning_ptdp.checkpoint.save_agreement import CheckpointError

BLOCK = 16 * 1024
DATA_SUFFIX, SUMS_SUFFIX = ".safetensors", ".crc"
Sums = np.ndarray[Any, Any]
"""CRC-32 of every block of a file; (blocks) uint32."""
PReadV = Callable[[Sequence[memoryview], int], int]
_SUM = np.dtype("<u4")
_REQUEST = 16 << 20  # bytes of one request, which are in memory


class SummingFile:
    """A data file that is being written, with the sums of its blocks.

    Attributes:
        position: Number of bytes that were written.
    """

    def __init__(self, stream: IO[bytes], sync: files.EarlySync) -> None:
        self._stream, self._sync = stream, sync
        self._crc = self.position = 0
        self._sums: list[int] = []

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._stream.write(content)
        begin = 0
        while begin < len(content):
            end = min(begin + BLOCK - self.position % BLOCK, len(content))
            self._crc = zlib_ng.crc32(content[begin:end], self._crc)
            self.position += end - begin
            begin = end
            if self.position % BLOCK == 0:
                self._end_block()
        self._sync.reached(self.position)

    def finish(self) -> bytes:
        """Wait for the current sync, and return the content of the ``.crc`` file.

        Raises:
            OSError: The disk did not accept earlier bytes.
        """
        if self.position % BLOCK:
            self._end_block()
        self._sync.wait()
        return np.array(self._sums, dtype=_SUM).tobytes()

    def _end_block(self) -> None:
        self._sums.append(self._crc)
        self._crc = 0


@contextmanager
def summing(path: Place, size: int) -> Iterator[SummingFile]:
    """Return a context with a data file of ``size`` bytes to write."""
    with files.open_synced(path, size) as stream, closing(files.EarlySync(stream)) as sync:
        yield SummingFile(stream, sync)


def sums_bytes(size: int) -> int:
    """Return the size of the ``.crc`` file of a data file of ``size`` bytes."""
    return -(-size // BLOCK) * _SUM.itemsize


def parse_sums(content: bytes, *, size: int) -> Sums:
    """Return the content of a ``.crc`` file, for a data file of ``size`` bytes.

    Raises:
        Misfit: The content does not belong to that file.
    """
    if len(content) != sums_bytes(size):
        raise Misfit(
            f"has {len(content)} bytes, but for a file of {size} bytes it must have "
            f"{sums_bytes(size)}"
        )
    return np.frombuffer(content, dtype=_SUM)


class FetchedRanges:
    """Ranges of an object, to read in ascending order.

    Args:
        path: The object.
        ranges: Ranges [start, stop) of bytes. All that is read must be in them.
    """

    def __init__(self, path: RemotePath, ranges: Iterable[tuple[int, int]]) -> None:
        self._path = path
        self._ranges: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if self._ranges and start <= self._ranges[-1][1]:
                first, last = self._ranges.pop()
                start, stop = first, max(last, stop)
            self._ranges.append((start, stop))
        self._begin, self._piece = 0, memoryview(b"")

    def preadv(self, buffers: Sequence[memoryview], at: int) -> int:
        """Read bytes from position ``at`` into the first buffer, as ``os.preadv`` does."""
        if not self._begin <= at < self._begin + len(self._piece):
            index = bisect.bisect(self._ranges, at, key=lambda pair: pair[0]) - 1
            stop = min(at + _REQUEST, self._ranges[index][1])
            self._begin, self._piece = at, memoryview(self._path.read_bytes(at, stop))
        content = self._piece[at - self._begin :][: len(buffers[0])]
        buffers[0][: len(content)] = content
        return len(content)


@dataclass
class RawFile:
    """An open file that is read in parts.

    Attributes:
        preadv: Reads bytes from a position into the first buffer, and returns their number.
        path: The file.
    """

    preadv: PReadV
    path: Place

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Read the bytes [start, stop) into memory of that size.

        Raises:
            CheckpointError: The file is too short.
        """
        at = start
        while at < stop:
            count = self.preadv([into[at - start :]], at)
            if not count:
                raise CheckpointError(
                    f"{self.path} is damaged: it ends at byte {at} instead of {stop} or later"
                )
            at += count


@dataclass
class SummedFile(RawFile):
    """A data file that returns only checked bytes.

    Parts of blocks are read into the same memory, which is faster than new memory while it is in
    the processor's cache.

    Attributes:
        sums: Checksums of its blocks.
        size: Size of the file in bytes.
    """

    sums: Sums
    size: int

    def __post_init__(self) -> None:
        self._scratch = np.empty(0, dtype=np.uint8)

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Read the bytes [start, stop); whole blocks are read and compared with their sums.

        Raises:
            CheckpointError: The file is damaged in this range, or too short. The message names the
                file and the first damaged block.
        """
        if not 0 <= start <= stop <= self.size:
            raise CheckpointError(
                f"{self.path} is damaged: it should contain bytes {start} to {stop}, but it "
                f"has {self.size}"
            )
        begin, end = _blocks_of(start, stop, self.size)
        content = into
        is_part = (begin, end) != (start, stop)
        if is_part:
            if len(self._scratch) < end - begin:
                self._scratch = np.empty(end - begin, dtype=np.uint8)
            content = self._scratch.data[: end - begin]
        super().read(begin, end, content)
        for at in range(begin, end, BLOCK):
            if zlib_ng.crc32(content[at - begin : at - begin + BLOCK]) != self.sums[at // BLOCK]:
                raise CheckpointError(
                    f"{self.path} is damaged: the CRC-32 of bytes {at} to "
                    f"{min(at + BLOCK, self.size)} differs from the stored one"
                )
        if is_part:
            into[:] = content[start - begin : stop - begin]

    def check(self) -> None:
        """Read and compare the whole file, one MiB at a time.

        Raises:
            CheckpointError: The file is damaged.
        """
        piece = memoryview(bytearray(1 << 20))
        for start in range(0, self.size, len(piece)):
            stop = min(start + len(piece), self.size)
            self.read(start, stop, piece[: stop - start])


def _blocks_of(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the range of the blocks with the bytes [start, stop) of a file of ``size`` bytes."""
    return start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, size)


@contextmanager
def open_summed(
    path: Place, sums: Sums, *, size: int, ranges: Iterable[tuple[int, int]] = ()
) -> Iterator[SummedFile]:
    """Return a context with a data file of ``size`` bytes to read and compare with its sums.

    From object storage, only the blocks with the bytes ``ranges`` can be read.
    """
    if isinstance(path, RemotePath):
        blocks = (_blocks_of(start, stop, size) for start, stop in ranges)
        yield SummedFile(FetchedRanges(path, blocks).preadv, path, sums, size)
        return
    with open(path, "rb", buffering=0) as stream:
        yield SummedFile(functools.partial(os.preadv, stream.fileno()), path, sums, size)
