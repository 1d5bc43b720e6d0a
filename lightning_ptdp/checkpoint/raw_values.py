"""Values of a tensor as bytes, in pieces that fit a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from lightning_ptdp.checkpoint.checksums import BLOCK

__all__ = ["as_bytes", "pieces_of", "rows_at_once"]

_PIECE = 1 << 20
_STAGED = 32 << 20  # bytes that a GPU copies at a time: enough for the speed of its bus


def rows_at_once(row_bytes: int, nbytes: int = _PIECE) -> int:
    """Return the number of rows of ``row_bytes`` bytes that are about ``nbytes``.

    They end at the end of a block if the first of them begins at the beginning of one.
    """
    whole = BLOCK // math.gcd(BLOCK, row_bytes)
    return whole * max(1, nbytes // (whole * row_bytes))


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
    copied: torch.Tensor | None = None
    event = torch.cuda.Event()
    for place, rows in enumerate(values.split(count)):
        if len(buffers) < 2:
            buffers.append(torch.empty(shape, dtype=values.dtype, pin_memory=True))
        if copied is not None:
            event.synchronize()
        part = buffers[place % 2][: len(rows)].copy_(rows, non_blocking=True)
        event.record()
        if copied is not None:
            yield copied
        copied = part
    event.synchronize()
    assert copied is not None
    yield copied


def as_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data
