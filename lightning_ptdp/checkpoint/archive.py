"""A tensor written as ``torch.save`` writes it, in pieces that fit a cache.

``torch.save`` wants the tensor whole and contiguous, and computes a CRC-32 of its own beside ours.
Here it writes the archive around the values only (``torch.serialization.skip_data``); the values
are gathered, summed and written a piece after the other, each while it is in the processor's cache.
In the archive's directory their CRC-32 is 0, as after ``set_crc32_options(False)``: torch does not
look at it. ``stored_tensor.py`` reads the values."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterator
from typing import IO, cast

import numpy as np
import torch

from lightning_ptdp.checkpoint.checksums import BLOCK, SummingFile

__all__ = ["as_bytes", "rows_at_once", "write_archive"]

_PIECE = 1 << 20


def write_archive(file: SummingFile, values: torch.Tensor) -> tuple[int, int, int]:
    """Append a tensor of any device and strides; where its archive and where its values begin in
    the file, and the archive's length."""
    head, tail = _frame(values.shape, values.dtype)
    start = file.position
    file.write(head)
    begin = file.position
    file.write_blocks(_pieces(values))
    file.write(tail)
    return start, begin, file.position - start


def rows_at_once(row_bytes: int) -> int:
    """Return the number of rows of ``row_bytes`` bytes that are about one piece.

    They end at the end of a block if the first of them begins at the beginning of one.
    """
    whole = BLOCK // math.gcd(BLOCK, row_bytes)
    return whole * max(1, _PIECE // (whole * row_bytes))


def _pieces(values: torch.Tensor) -> Iterator[memoryview]:
    """The values row by row, in pieces that all but the last end where a block ends; each is valid
    until the next is asked for."""
    if not values.numel():
        return
    if values.is_cpu and values.is_contiguous():
        content = as_bytes(values)
        for begin in range(0, len(content), _PIECE):
            yield content[begin : begin + _PIECE]
        return
    count = rows_at_once(values[0].numel() * values.element_size())
    buffer = torch.empty_like(values[:count], device="cpu", memory_format=torch.contiguous_format)
    for rows in values.split(count):
        part = buffer[: len(rows)]
        if rows.is_cpu and rows.stride(-1) == 1:  # torch copies short rows at half the speed
            np.copyto(part.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
        else:
            part.copy_(rows)
        yield as_bytes(part)


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data


@functools.lru_cache(maxsize=256)
def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values in an archive."""
    stream = _Frame()
    with torch.serialization.skip_data():
        torch.save(
            torch.empty(shape, dtype=dtype), cast(IO[bytes], stream)
        )  # memory that is never touched
    head, tail = (b"".join(parts) for parts in (stream.head, stream.tail))
    assert stream.hole == math.prod(shape) * dtype.itemsize, (shape, dtype, stream.hole)
    return head, tail


class _Frame(io.RawIOBase):
    """Takes what ``torch.save`` writes, and where it leaves room for values."""

    def __init__(self) -> None:
        self.head: list[bytes] = []
        self.tail: list[bytes] = []
        self.hole = 0

    def write(self, content: object) -> int:
        part = bytes(memoryview(content))  # type: ignore[arg-type]
        (self.tail if self.hole else self.head).append(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and not self.hole, "torch.save leaves one hole"
        self.hole = offset
        return offset
