"""Devices by name."""

from __future__ import annotations

import pytest

from lightning_ptdp.planner import known_peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5e12),
        ("NVIDIA H200", "16-true", 989e12),
        ("cpu", "32-true", None),
        ("NVIDIA T4", "32-true", None),
    ],
)
def test_peaks_of_known_devices(device: str, precision: str, peak: float | None) -> None:
    assert known_peak_flops(device, precision) == peak
