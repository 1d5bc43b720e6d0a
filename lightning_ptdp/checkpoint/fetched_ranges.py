"""Ranges of an object that are fetched when they are read. No other bytes are fetched."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from lightning_ptdp.checkpoint.remote_path import RemotePath

_PIECE = 16 << 20  # bytes of one request, which are in memory


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
            stop = min(at + _PIECE, self._ranges[index][1])
            self._begin, self._piece = at, memoryview(self._path.read_bytes(at, stop))
        content = self._piece[at - self._begin :][: len(buffers[0])]
        buffers[0][: len(content)] = content
        return len(content)
