"""Values of a tensor as bytes, in pieces that fit a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from lightning_ptdp.checkpoint.checksums import BLOCK

__all__ = ["as_bytes", "pieces_of", "rows_at_once"]

_PIECE = 1 << 20


def rows_at_once(row_bytes: int) -> int:
    """Return the number of rows of ``row_bytes`` bytes that are about one piece.

    They end at the end of a block if the first of them begins at the beginning of one.
    """
    whole = BLOCK // math.gcd(BLOCK, row_bytes)
    return whole * max(1, _PIECE // (whole * row_bytes))


def pieces_of(values: torch.Tensor) -> Iterator[memoryview]:
    """Yield the values row by row; every piece but the last ends where a block ends.

    A piece is valid until the next one is requested.
    """
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
    """Return the memory of a contiguous tensor on the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data
