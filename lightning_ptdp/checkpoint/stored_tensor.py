"""Reading of rectangles of stored tensors, without the rest of the file.

A file holds the values of a tensor row by row. Only the runs of bytes that the rectangle touches
are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lightning_ptdp.checkpoint.checksums import BLOCK, RawFile
from lightning_ptdp.checkpoint.local_rectangles import LocalRectangle
from lightning_ptdp.checkpoint.metadata import TensorEntry
from lightning_ptdp.checkpoint.remote_path import Place, each
from lightning_ptdp.checkpoint.save_agreement import reading
from lightning_ptdp.parameters.rectangle import Rectangle

PIECE = 1 << 20  # bytes that are read or written at a time, in the processor's cache


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, or a rectangle of one.

    Attributes:
        file: The file.
        begin: Byte of the file at which the values begin.
        entry: Shape and dtype.
    """

    file: Place
    begin: int
    entry: TensorEntry


Part = tuple[StoredTensor, LocalRectangle]
"""A stored tensor, and a rectangle of it to fill, whose offset is that in the stored tensor."""


@contextmanager
def _open_unchecked(path: Place, _: Sequence[Part]) -> Iterator[RawFile]:
    with open(path, "rb", buffering=0) as stream:
        yield RawFile(partial(os.preadv, stream.fileno()), path)


def read_stored(
    wanted: Iterable[Part],
    open_file: Callable[[Place, Sequence[Part]], AbstractContextManager[RawFile]] = _open_unchecked,
) -> None:
    """Fill rectangles of stored tensors, converted to the dtype of each rectangle.

    Only the bytes of the rectangles and small gaps are read, in the order of the files. No file is
    memory-mapped.

    Args:
        wanted: The rectangles.
        open_file: Opens a file for the rectangles that are read from it.

    Raises:
        CheckpointError: A file cannot be read, has become shorter, or is damaged.
    """
    by_file: dict[Place, list[Part]] = {}
    for stored, target in wanted:
        by_file.setdefault(stored.file, []).append((stored, target))

    def read(path: Place) -> None:
        parts = sorted(by_file[path], key=lambda part: (part[0].begin, part[1].offset))
        with reading(path), open_file(path, parts) as file:
            for stored, target in parts:
                read_rectangle(file, stored, target)

    each(next(iter(by_file), Path()), read, sorted(by_file))


def read_rectangle(file: RawFile, stored: StoredTensor, rectangle: LocalRectangle) -> None:
    """Fill a rectangle of a stored tensor, a few rows at a time.

    Full rows are read into the rectangle's values, if these have their dtype. Other parts are
    placed at their positions in full rows, and copied from there while in the processor's cache.

    Args:
        file: The file.
        stored: The stored tensor.
        rectangle: The rectangle, whose offset is that in the stored tensor. Its values may have any
            dtype, device and strides.

    Raises:
        CheckpointError: A byte that was read is damaged. The values may then be partly filled.
    """
    target = rectangle.values
    offset = rectangle.offset
    shape = stored.entry.shape
    dtype = stored.entry.dtype
    if not target.numel():
        return
    if not target.dim():
        target = target.unsqueeze(0)
        offset = (0,)
        shape = (1,)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    count = rows_at_once(row_bytes)
    has_full_rows = (
        target.is_cpu and target.is_contiguous() and target.shape[1:] == tuple(shape[1:])
    )
    is_lazy = target.is_conj() or target.is_neg()
    is_direct = has_full_rows and target.dtype == dtype and not is_lazy
    scratch = np.empty(0 if is_direct else min(count, len(target)) * row_bytes, dtype=np.uint8)
    columns = Rectangle.at(offset[1:], target.shape[1:]).slices
    first, last = offset[0], offset[0] + len(target)
    while first < last:
        end = min((first // count + 1) * count, last)  # end of a block of the file
        rows = target[first - offset[0] : end - offset[0]]
        rows_shape = (len(rows), *shape[1:])
        buffer = as_bytes(rows) if is_direct else scratch[: len(rows) * row_bytes].data
        for start, stop in runs(rows_shape, (0, *offset[1:]), rows.shape, itemsize=dtype.itemsize):
            position = stored.begin + first * row_bytes
            file.read(position + start, position + stop, buffer[start:stop])
        if not is_direct:
            values = torch.from_numpy(scratch[: len(buffer)]).view(dtype).view(rows_shape)
            rows.copy_(values[slice(None), *columns])
        first = end


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


def rows_at_once(row_bytes: int, nbytes: int = PIECE) -> int:
    """Return the number of rows of ``row_bytes`` bytes that are about ``nbytes``.

    They end at the end of a block if the first of them begins at the beginning of one.
    """
    aligned_rows = BLOCK // math.gcd(BLOCK, row_bytes)
    return aligned_rows * max(1, nbytes // (aligned_rows * row_bytes))


def as_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat = values.as_strided((values.numel(),), (1,))  # the stride of one element is arbitrary
    return flat.view(torch.uint8).numpy().data
