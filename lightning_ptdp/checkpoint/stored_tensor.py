"""Rectangles of one stored tensor, read with little more than their bytes, and values as bytes.

A file holds the values of a tensor row by row. Only the runs of bytes that the rectangle touches
are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from lightning_ptdp.checkpoint.checksums import BLOCK


class ReadFile(Protocol):
    """A file with random access to its bytes."""

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """Return the bytes [start, stop).

        If the returned memory is not ``into``, the next call may reuse it.
        """


def read_rectangle(
    file: ReadFile,
    target: torch.Tensor,
    *,
    begin: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Fill ``target`` with a rectangle of a stored tensor.

    Args:
        file: The file.
        target: Tensor of the rectangle's shape, with any dtype, device and strides.
        begin: Byte of the file at which the stored tensor's values begin.
        dtype: Dtype of the stored tensor.
        shape: Shape of the stored tensor.
        offset: Position of the rectangle in the stored tensor.

    Raises:
        CheckpointError: A byte that was read is damaged. The target may then be partly filled.
    """
    if not target.numel():
        return
    if not target.dim():
        target, shape, offset = target.unsqueeze(0), (1,), (0,)
    if target.shape[1:] == tuple(shape[1:]):
        _read_rows(file, target, begin, dtype, first=offset[0])
    else:
        _read_runs(file, target, begin, dtype, shape, offset)


def _read_rows(
    file: ReadFile, target: torch.Tensor, data: int, dtype: torch.dtype, *, first: int
) -> None:
    """Read whole rows in pieces, each checked and copied while in the processor's cache."""
    row_bytes = math.prod(target.shape[1:]) * dtype.itemsize
    count = rows_at_once(row_bytes)
    begin, last = first, first + len(target)
    while begin < last:
        end = min((begin // count + 1) * count, last)  # end of a block of the file
        rows = target[begin - first : end - first]
        buffer = (
            as_bytes(rows) if rows.is_cpu and rows.is_contiguous() and rows.dtype == dtype else None
        )
        content = file.read(data + begin * row_bytes, data + end * row_bytes, into=buffer)
        if content is not buffer:
            values = np.frombuffer(content, dtype=np.uint8)
            # Small tensors begin anywhere in a block, so their values may not be aligned.
            values = values.copy() if values.ctypes.data % dtype.itemsize else values
            rows.copy_(torch.from_numpy(values).view(dtype).view(rows.shape))
        begin = end


def _read_runs(
    file: ReadFile,
    target: torch.Tensor,
    data: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Read parts of rows, a few rows at a time.

    The parts are placed at their positions in whole rows, and copied from there.
    """
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    count = min(rows_at_once(row_bytes), len(target))
    scratch = np.empty(count * row_bytes, dtype=np.uint8)
    columns = tuple(
        slice(begin, begin + extent)
        for begin, extent in zip(offset[1:], target.shape[1:], strict=True)
    )
    for first in range(0, len(target), count):
        rows = target[first : first + count]
        start = data + (offset[0] + first) * row_bytes
        for begin, end in runs(
            (len(rows), *shape[1:]), (0, *offset[1:]), rows.shape, itemsize=dtype.itemsize
        ):
            buffer = scratch[begin:end].data
            content = file.read(start + begin, start + end, into=buffer)
            if content is not buffer:
                buffer[:] = content
        values = torch.from_numpy(scratch).view(dtype).view(count, *shape[1:])
        rows.copy_(values[slice(len(rows)), *columns])


def runs(
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    *,
    itemsize: int,
    gap: int = BLOCK,
) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a rectangle in a tensor stored row by row, ascending.

    A range includes gaps of less than ``gap`` bytes; the default is a block, which is read anyway.
    """
    inner = len(shape)
    while inner > 0 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    stride = math.prod(shape[outer + 1 :]) * itemsize
    length = (size[outer] if size else 1) * stride
    first = (offset[outer] if offset else 0) * stride
    steps = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(outer)]
    begin = end = -1
    for index in np.ndindex(*size[:outer]):
        position = first + sum((offset[dim] + index[dim]) * step for dim, step in enumerate(steps))
        if begin >= 0 and position - end >= gap:
            yield begin, end
            begin = position
        begin, end = (position if begin < 0 else begin), position + length
    if begin >= 0:
        yield begin, end


# ---- Values of a tensor as bytes, in pieces that fit a processor's cache -------------------------


_PIECE = 1 << 20
_STAGED = 32 << 20  # bytes that a GPU copies at a time: enough for the speed of its bus


def rows_at_once(row_bytes: int, nbytes: int = _PIECE) -> int:
    """Return the number of rows of ``row_bytes`` bytes that are about ``nbytes``.

    They end at the end of a block if the first of them begins at the beginning of one.
    """
    aligned_rows = BLOCK // math.gcd(BLOCK, row_bytes)
    return aligned_rows * max(1, nbytes // (aligned_rows * row_bytes))


def pieces_of(values: torch.Tensor) -> Iterator[memoryview]:
    """Yield the values row by row; every piece but the last ends where a block ends.

    A piece is valid until the next one is requested.
    """
    if not values.numel():
        return
    if values.is_cpu and values.is_contiguous():
        yield from _cut(values)
        return
    row_bytes = values[0].numel() * values.element_size()
    if values.is_cuda:
        for part in _staged(values, rows_at_once(row_bytes, _STAGED)):
            yield from _cut(part)
        return
    count = rows_at_once(row_bytes)
    buffer = torch.empty_like(values[:count], device="cpu", memory_format=torch.contiguous_format)
    for rows in values.split(count):
        part = buffer[: len(rows)]
        if rows.is_cpu and rows.stride(-1) == 1:  # torch copies short rows at half the speed
            np.copyto(part.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
        else:
            part.copy_(rows)
        yield as_bytes(part)


def _cut(values: torch.Tensor) -> Iterator[memoryview]:
    content = as_bytes(values)
    for begin in range(0, len(content), _PIECE):
        yield content[begin : begin + _PIECE]


def _staged(values: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield ``count`` rows of a GPU's tensor at a time, while it copies the next ones.

    Rows are valid until the next ones are requested. There are two buffers in page-locked memory.
    """
    shape, buffers = (min(count, len(values)), *values.shape[1:]), list[torch.Tensor]()
    pending: torch.Tensor | None = None
    event = torch.cuda.Event()
    for index, rows in enumerate(values.split(count)):
        if len(buffers) < 2:
            buffers.append(torch.empty(shape, dtype=values.dtype, pin_memory=True))
        if pending is not None:
            event.synchronize()
        part = buffers[index % 2][: len(rows)].copy_(rows, non_blocking=True)
        event.record()
        if pending is not None:
            yield pending
        pending = part
    event.synchronize()
    assert pending is not None
    yield pending


def as_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data
