"""Keeping the C library from holding on to freed activations on CPU."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["LARGE_BLOCK", "return_large_blocks"]

_M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK = 1 << 20
"""Bytes."""


def return_large_blocks() -> bool:
    """Have glibc give blocks of 1 MiB and more back to the system when they are freed; whether it
    could be told so.

    By itself glibc raises that limit to the largest block it has seen freed. The heap then
    fragments around activations that live
    through a pipeline's many different lifetimes: measured, a rank of a 3 M parameter GPT grew from
    0.6 to 2.7 GB in 150 steps, and not at all with a fixed limit. Its price are new pages for every
    such block, which ``ptdp doctor --calibrate`` measures."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK))
    return False
