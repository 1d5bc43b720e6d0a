"""Memory of tensors, counted on a CPU."""

import pytest
import torch

from lightning_ptdp.bench.measure import CountedMemory
from lightning_ptdp.shims.torch import without_data

MEBI = 2**20


def peak(*, frees):
    kept = torch.nn.Parameter(torch.zeros(MEBI))
    kept.grad = torch.zeros(2 * MEBI)[:MEBI]  # a view of a larger tensor
    other = kept.detach()  # the same memory
    with CountedMemory() as count:
        if frees:
            kept.grad = None
        for size in (3, 5, 1):
            torch.zeros(size * MEBI).add_(1)
        other.mul_(2)
    return count.peak_bytes


def test_peak_memory_counts_live_tensors():
    with CountedMemory() as nothing:
        torch.zeros(8)
    whole = 4 * MEBI
    assert peak(frees=False) - nothing.peak_bytes == pytest.approx((1 + 2 + 5) * whole, rel=0.01)
    assert peak(frees=True) - nothing.peak_bytes == pytest.approx((1 + 5) * whole, rel=0.01)


def test_tensors_without_data_are_not_counted():
    with without_data():
        planned = torch.zeros(1000 * MEBI)
    with CountedMemory() as count:
        torch.zeros(MEBI)
    assert count.peak_bytes < planned.numel()
