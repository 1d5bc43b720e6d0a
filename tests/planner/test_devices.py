"""Devices by name."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_ptdp.planner import DEVICES, Cluster, Link, find_device, find_software, known_device, known_peak_flops


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


def test_devices() -> None:
    assert find_device("A100") is DEVICES["a100-80gb"]
    assert find_device("h200").usable_bytes == 135 * 2**30
    with pytest.raises(ValueError, match=r"device='h1000' is unknown: did you mean 'h"):
        find_device("h1000")
    with pytest.raises(ValueError, match=r"product_share=1\.2 is a share"):
        dataclasses.replace(find_device("cpu"), product_share=1.2)
    with pytest.raises(ValueError, match="flops_16=0 must be greater"):
        dataclasses.replace(find_device("cpu"), flops_16=0)
    with pytest.raises(ValueError, match="reserved_bytes"):
        dataclasses.replace(find_device("cpu"), reserved_bytes=1e15)
    with pytest.raises(ValueError, match="node_size=0"):
        Cluster(node_size=0, cards=1, node=Link(bandwidth=1.0, latency_s=0.0), card=Link(bandwidth=1.0, latency_s=0.0))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_devices_by_what_they_call_themselves(name: str, preset: str) -> None:
    assert known_device(name) is DEVICES[preset]


def test_software() -> None:
    assert find_software("ours-compiled").attention == "fused"
    with pytest.raises(ValueError, match=r"software='megatron' is unknown: did you mean 'megatron-20"):
        find_software("megatron")
