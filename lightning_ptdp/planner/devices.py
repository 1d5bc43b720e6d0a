"""What a device can do, in a few numbers; presets by name.

The presets' rates are the vendors' (data sheets named beside each), their efficiencies what matrix products, attention and collectives
of large models are known to reach. They are meant to rank layouts, not to replace a measurement: change what you know better with
``dataclasses.replace``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from lightning_ptdp.option_types import check_types

__all__ = ["DEVICES", "Device", "Link", "find_device", "known_device", "known_peak_flops"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Link:
    """The alpha-beta model of a connection: a message of x bytes takes ``latency_s + x / bandwidth``.

    Attributes:
        bandwidth: Bytes a second, of one device in one direction.
        latency_s: Seconds until the first byte is there.
    """

    bandwidth: float
    latency_s: float

    def __post_init__(self) -> None:
        check_types(self)
        if not (self.bandwidth > 0 and self.latency_s >= 0):
            raise ValueError(
                f"bandwidth={self.bandwidth!r} must be greater than 0, and latency_s={self.latency_s!r} must not be negative"
            )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, and how several are connected.

    Attributes:
        name: For tables.
        memory_bytes: What a process can allocate at most.
        reserved_bytes: Of that, what the driver, communication buffers, workspaces and fragmentation take.
        flops_16: Peak operations a second of dense matrix products in bf16 or fp16, accumulated in fp32.
        flops_32: The same in fp32, as torch computes it by default (without TF32).
        memory_bandwidth: Bytes a second, of its own memory.
        gemm_efficiency: Share of the peak that a large matrix product reaches.
        attention_efficiency: Share of the peak that the fused attention kernel reaches.
        kernel_s: Seconds between the launches of two kernels; what a small operation takes at least.
        node_size: Devices of a node.
        inside: Between devices of a node.
        between: Between nodes; the bandwidth is a device's share.

    Raises:
        ValueError: A number is not positive, or an efficiency above 1.
    """

    name: str
    memory_bytes: float
    reserved_bytes: float = 0.0
    flops_16: float
    flops_32: float
    memory_bandwidth: float
    gemm_efficiency: float
    attention_efficiency: float
    kernel_s: float
    node_size: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "reserved_bytes" and not value > 0:
                raise ValueError(f"{field.name}={value!r} must be greater than 0")
            if field.name.endswith("_efficiency") and value > 1:
                raise ValueError(f"{field.name}={value!r} is a share of the peak: use a number between 0 and 1")
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ValueError(
                f"reserved_bytes={self.reserved_bytes!r} must be at least 0 and below memory_bytes={self.memory_bytes!r}"
            )

    @property
    def usable_bytes(self) -> float:
        """Memory that training can use."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, element_bytes: int) -> float:
        """Peak operations a second for elements of 2 or 4 bytes."""
        return self.flops_16 if element_bytes == 2 else self.flops_32


# Collectives reach about 80 % of a link's rate.
_A100 = Device(
    name="a100-80gb",
    # NVIDIA A100 80GB (SXM) data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s in both directions together.
    memory_bytes=79 * _GIB,
    reserved_bytes=4 * _GIB,
    flops_16=312e12,
    flops_32=19.5e12,
    memory_bandwidth=2.039e12,
    gemm_efficiency=0.75,
    attention_efficiency=0.6,  # arXiv 2307.08691, figures 4 to 6: 50 to 73 %
    kernel_s=4e-6,
    node_size=8,
    inside=Link(bandwidth=0.8 * 300e9, latency_s=5e-6),
    # arXiv 2104.04473, section 5: eight 200 Gbps HDR InfiniBand cards a node, one a GPU.
    between=Link(bandwidth=0.8 * 25e9, latency_s=15e-6),
)
_H100 = Device(
    name="h100-80gb",
    # NVIDIA H100 (SXM) data sheet: 989 TFLOP/s bf16 without sparsity, 67 fp32, 3.35 TB/s, NVLink 900 GB/s both ways.
    memory_bytes=79 * _GIB,
    reserved_bytes=4 * _GIB,
    flops_16=989e12,
    flops_32=67e12,
    memory_bandwidth=3.35e12,
    gemm_efficiency=0.7,
    attention_efficiency=0.38,  # arXiv 2407.08608, section 1: FlashAttention-2, which torch has, reaches 35 to 40 %
    kernel_s=4e-6,
    node_size=8,
    inside=Link(bandwidth=0.8 * 450e9, latency_s=5e-6),
    # NVIDIA DGX H100 data sheet: eight 400 Gbps cards.
    between=Link(bandwidth=0.8 * 50e9, latency_s=15e-6),
)
# NVIDIA H200 (SXM) data sheet: an H100 with 141 GB at 4.8 TB/s.
_H200 = replace(_H100, name="h200", memory_bytes=139 * _GIB, memory_bandwidth=4.8e12)
_CPU = Device(
    name="cpu",
    # One core for each process, joined by gloo over the loopback device; orders of magnitude, no data sheet.
    memory_bytes=4 * _GIB,
    flops_16=25e9,
    flops_32=50e9,
    memory_bandwidth=10e9,
    gemm_efficiency=0.8,
    attention_efficiency=0.4,
    kernel_s=1e-5,
    node_size=64,
    inside=Link(bandwidth=1e9, latency_s=1e-4),
    between=Link(bandwidth=1e9, latency_s=2e-4),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in (_A100, _H100, _H200, _CPU)})
"""The presets."""


def find_device(name: str) -> Device:
    """The preset called ``name``, in any case; ``"a100"`` and ``"h100"`` are enough.

    Raises:
        ValueError: There is none; the message names the nearest.
    """
    wanted = name.lower()
    found = [device for key, device in DEVICES.items() if key == wanted or key.startswith(f"{wanted}-")]
    if found:
        return found[0]
    near = difflib.get_close_matches(wanted, DEVICES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"device={name!r} is unknown: {hint}The devices are {', '.join(DEVICES)}")


def known_device(name: str) -> Device | None:
    """The preset of a device that calls itself ``name`` ("NVIDIA H100 80GB HBM3", "cpu"); None if it is none of them."""
    words = name.lower().replace("-", " ").split()
    return next((preset for key, preset in DEVICES.items() if key.partition("-")[0] in words), None)


def known_peak_flops(device: str, precision: str) -> float | None:
    """The data sheet's dense peak of a GPU that calls itself ``device``, in Lightning's ``precision``; None if it is none of the
    presets."""
    preset = known_device(device)
    return None if preset is None or preset.name == "cpu" else preset.peak(2 if "16" in precision else 4)
