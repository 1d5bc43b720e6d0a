"""A CPU's tensors, counted."""

from __future__ import annotations

import pytest
import torch

from lightning_ptdp.bench.memory import CountedMemory

MEBI = 2**20


def test_the_peak_is_that_of_the_tensors() -> None:
    kept = torch.nn.Parameter(torch.zeros(MEBI))
    kept.grad = torch.zeros(MEBI)
    before = CountedMemory().peak_bytes()
    half = kept.detach()[: MEBI // 2]  # of the same memory
    more = torch.zeros(2 * MEBI)
    count = CountedMemory()
    kept.grad = None
    for size in (3, 5, 1):
        torch.zeros(size * MEBI).add_(1)
    assert count.peak_bytes() - before == pytest.approx(more.nbytes + 5 * MEBI * 4, rel=1e-3)
    del half
