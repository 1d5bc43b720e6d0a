"""The heap of the C library during a training on a CPU."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_ptdp.shims.glibc import Heap

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(
        "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="another C library"
    ),
]
_MIB = 2**20


def _resident_bytes():
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _use(count):
    """Fill and free ``count`` tensors of 1 MiB; return the resident bytes while they exist."""
    tensors = [torch.ones(_MIB, dtype=torch.uint8) for _ in range(count)]
    resident = _resident_bytes()
    del tensors
    return resident


def test_freed_blocks_stay_until_process_has_grown():
    count = _resident_bytes() // _MIB // 2  # clearly more than a tenth
    with closing(Heap()) as heap:
        for _ in range(2):  # the second call is that after the first step
            heap.trim_if_grown()
        before = _resident_bytes()
        peak = _use(count)
        assert peak > before + 0.9 * count * _MIB
        assert _resident_bytes() > peak - 0.1 * count * _MIB, "the blocks went back at once"
        heap.trim_if_grown()
        assert _resident_bytes() < before + 0.1 * count * _MIB, "the blocks were kept"


def test_memory_that_setup_freed_is_returned_before_first_step():
    count = _resident_bytes() // _MIB // 2
    before = _resident_bytes()
    with closing(Heap()) as heap:
        _use(count)
        heap.trim_if_grown()
        assert _resident_bytes() < before + 0.1 * count * _MIB


def test_end_of_training_returns_free_pages():
    count = _resident_bytes() // _MIB // 2
    before = _resident_bytes()
    with closing(Heap()):
        _use(count)
    assert _resident_bytes() < before + 0.1 * count * _MIB
