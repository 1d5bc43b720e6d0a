"""Settings of the C library that make it return freed activations on a CPU."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["LARGE_BLOCK", "return_large_blocks"]

_M_MMAP_THRESHOLD = -3  # from malloc.h
LARGE_BLOCK = 1 << 20
"""Bytes of the smallest block that is returned to the system when it is freed."""


def return_large_blocks() -> bool:
    """Let glibc return blocks of 1 MiB and more to the system; return True if it accepts that.

    By default glibc raises this limit to the largest block that has been freed. Activations live
    through a pipeline's many different lifetimes, and the heap then fragments around them. As
    measured, a rank of a 3 M parameter GPT grew from 0.6 to 2.7 GB in 150 steps, and did not grow
    with a fixed limit. The cost is new pages for every such block, which ``ptdp doctor
    --calibrate`` measures."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK))
    return False
