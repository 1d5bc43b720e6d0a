"""A rectangle out of one stored tensor, reading little more than its bytes.

DCP stores a tensor as ``torch.save`` writes it: an archive whose one large record, ``data/0``, holds the values row by row. Where that
record begins is found in the archive's first bytes; then only the runs of it that the rectangle touches are read.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lightning_ptdp.checkpoint.archive import as_bytes, rows_at_once
from lightning_ptdp.checkpoint.sums import BLOCK, SummedFile

__all__ = ["read_rectangle", "runs"]

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a record in a zip archive: signature, …, length of the name and of what follows it
_SMALL = 4 * BLOCK


def read_rectangle(
    file: SummedFile,
    target: torch.Tensor,
    *,
    start: int,
    stop: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: Sequence[int],
) -> None:
    """Fill ``target`` with the rectangle at ``offset`` of the tensor of ``shape`` that is stored in bytes [start, stop) of ``file``.

    Args:
        target: Has the rectangle's shape; any dtype, device and strides.

    Raises:
        CheckpointError: A byte that was read is damaged; the target may then be filled in part.
    """
    size = tuple(target.shape)
    data = None if stop - start <= _SMALL else _find_data(file, start, stop)
    if data is None or data + math.prod(shape) * dtype.itemsize > stop:
        index = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, size, strict=True))
        target.copy_(torch.load(io.BytesIO(file.read(start, stop)), map_location="cpu", weights_only=True)[index])
    elif size[1:] == tuple(shape[1:]):
        _read_rows(file, target, data, dtype, first=offset[0])
    else:
        _read_runs(file, target, data, dtype, shape, offset)


def _read_rows(file: SummedFile, target: torch.Tensor, data: int, dtype: torch.dtype, *, first: int) -> None:
    """Whole rows, a piece after the other, each checked and copied while it is in the processor's cache."""
    row = math.prod(target.shape[1:]) * dtype.itemsize
    count = rows_at_once(row)
    begin, last = first, first + len(target)
    while begin < last:
        end = min((begin // count + 1) * count, last)  # where a block of the file ends
        rows = target[begin - first : end - first]
        own = as_bytes(rows) if rows.is_cpu and rows.is_contiguous() and rows.dtype == dtype else None
        content = file.read(data + begin * row, data + end * row, into=own)
        if content is not own:
            rows.copy_(torch.from_numpy(np.frombuffer(content, dtype=np.uint8)).view(dtype).view(rows.shape))
        begin = end


def _read_runs(
    file: SummedFile, target: torch.Tensor, data: int, dtype: torch.dtype, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Parts of rows. They are put where they lie in the whole tensor: memory that nothing is read into is never touched."""
    whole = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    for begin, end in runs(shape, offset, target.shape, itemsize=dtype.itemsize):
        whole[begin:end] = file.read(data + begin, data + end)
    index = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, target.shape, strict=True))
    target.copy_(torch.from_numpy(whole).view(dtype).view(tuple(shape))[index])


def runs(shape: Sequence[int], offset: Sequence[int], size: Sequence[int], *, itemsize: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a rectangle in a tensor stored row by row, ascending; gaps of less than a block, which would be read anyway, are
    in them."""
    inner = len(shape)
    while inner > 0 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    stride = math.prod(shape[outer + 1 :]) * itemsize
    length = (size[outer] if size else 1) * stride
    first = (offset[outer] if offset else 0) * stride
    steps = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(outer)]
    begin = end = -1
    for place in np.ndindex(*size[:outer]):
        at = first + sum((offset[dim] + place[dim]) * step for dim, step in enumerate(steps))
        if begin >= 0 and at - end >= BLOCK:
            yield begin, end
            begin = at
        begin, end = (at if begin < 0 else begin), at + length
    if begin >= 0:
        yield begin, end


def _find_data(file: SummedFile, start: int, stop: int) -> int | None:
    """Where the values of an archive at ``start`` begin, or None if this is not what ``torch.save`` writes today."""
    end = start
    while end < min(stop, start + 2 * BLOCK):
        end = file.block_end(end)
        head = bytes(file.read(start, end))
        last = head.rfind(b"PK\x03\x04")
        if last < 0 or len(head) < last + _LOCAL_HEADER.size:
            continue
        _, name_length, extra_length = _LOCAL_HEADER.unpack_from(head, last)
        name = head[last + _LOCAL_HEADER.size :][:name_length]
        begin = last + _LOCAL_HEADER.size + name_length + extra_length
        if name.endswith(b"/data/0") and begin == len(head) and sys.byteorder.encode() in head:
            return end
    return None
