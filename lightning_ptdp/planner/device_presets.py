"""Presets of devices by name.

Their rates are the vendors'; the data sheets are named next to each preset. The shares of these
rates that programs reach are published measurements, also named there. Use ``dataclasses.replace``
to change a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lightning_ptdp.base.errors import did_you_mean
from lightning_ptdp.planner.devices import Cluster, Device, Link

_GIB = 2**30

# Start of a collective and one step of its ring. All-reduces of 1 to 64 MiB on 2, 4 and 8 A100s
# connected by NVSwitch take 30 us + 5 us per step longer than their bytes (published with arXiv
# 2312.12391). The same measurements reach 229 of 300 GB/s at 1 GiB.
_START_S = 30e-6
_STEP_S = 5e-6
_NODE_SHARE = 0.77
# Between nodes: NCCL's own model takes 14 us per step of a ring over the network
# (src/graph/tuning.cc, hwLat). Collectives reach about 90 % of InfiniBand's rate because of the
# encoding (64 of 66 bits), headers and the time to fill the ring.
_HOP_S = 14e-6
_CARD_SHARE = 0.9
# Share of the memory bandwidth that reads and writes reach: arXiv 2402.13499, table 5 (A100 and
# H100, PCIe).
_MEMORY_SHARE = 0.9
_NAMED_SHARE = 0.98  # of the memory in a device's name that a process can allocate
_CYCLES = 470
"""Latency of a read that misses the caches, in clock cycles.

Source: arXiv 2402.13499, table 4: 466 on an A100, 479 on an H100.
"""

_SUSTAINED = 0.89
"""The only fitted number here: to rows 1, 3, 5, 7 and 9 of table 1 of arXiv 2104.04473."""


def _nvidia_node(*, node_size: int = 8, cards: int = 8, nvlink: float, card: float) -> Cluster:
    """Return a node of NVIDIA GPUs.

    Args:
        node_size: GPUs per node.
        cards: Network cards per node.
        nvlink: Bytes per second of a GPU in one direction, from the data sheet.
        card: Bytes per second of a network card in one direction, from the data sheet.
    """
    return Cluster(
        node_size=node_size,
        cards=cards,
        node=Link(bandwidth=_NODE_SHARE * nvlink, latency_s=_STEP_S),
        card=Link(bandwidth=_CARD_SHARE * card, latency_s=_HOP_S),
        start_s=_START_S,
    )


_A100 = Device(
    name="a100-80gb",
    # NVIDIA A100 80GB (SXM) data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s in
    # both directions together; A100 whitepaper: 108 multiprocessors at 1.41 GHz, L2 5,120 bytes per
    # clock.
    memory_bytes=79 * _GIB,
    reserved_bytes=_GIB,
    flops_16=312e12,
    flops_32=19.5e12,
    memory_bandwidth=2.039e12,
    memory_share=_MEMORY_SHARE,
    # 271.2 TFLOP/s: S. Bekman, Machine Learning Engineering, table of the maximum achievable matmul
    # FLOPS
    product_share=0.869,
    attention_share=0.6,  # arXiv 2307.08691, figures 4 to 6: 50 to 73 %
    sustained=_SUSTAINED,
    units=108,
    cache_bandwidth=5120 * 1.41e9,
    memory_latency_s=_CYCLES / 1.41e9,
    # arXiv 2104.04473, section 5: eight 200 Gbps HDR InfiniBand cards per node, one per GPU.
    cluster=_nvidia_node(nvlink=300e9, card=25e9),
)
# NVIDIA A100 40GB (SXM) data sheet: 1,555 GB/s.
_A100_40 = replace(_A100, name="a100-40gb", memory_bytes=39.5 * _GIB, memory_bandwidth=1.555e12)
# NVIDIA A100 80GB PCIe data sheet: 1,935 GB/s, 300 W; without a bridge, PCIe 4.0 x16 has 64 GB/s in
# both directions together. 252.9 TFLOP/s in the same table.
_A100_PCIE = replace(
    _A100,
    name="a100-pcie",
    memory_bandwidth=1.935e12,
    product_share=0.811,
    cluster=_nvidia_node(cards=2, nvlink=32e9, card=25e9),
)
_V100 = Device(
    name="v100",
    # NVIDIA V100 (SXM2, 32 GB) data sheet: 125 TFLOP/s fp16, 15.7 fp32, 900 GB/s, NVLink 300 GB/s
    # in both directions together; V100 whitepaper: 80 multiprocessors at 1.53 GHz; A100 whitepaper:
    # V100's L2 gives 2,048 bytes per clock.
    memory_bytes=31.7 * _GIB,
    reserved_bytes=_GIB,
    flops_16=125e12,
    flops_32=15.7e12,
    memory_bandwidth=0.9e12,
    memory_share=_MEMORY_SHARE,
    product_share=0.74,  # arXiv 1804.06826, section 4.4: 83 of 112.7 TFLOP/s
    # The only fused kernel is torch's memory-efficient one, which reaches no more than products do.
    attention_share=0.5,
    sustained=_SUSTAINED,
    units=80,
    cache_bandwidth=2048 * 1.53e9,
    memory_latency_s=_CYCLES / 1.53e9,
    # arXiv 1909.08053, section 5: DGX-2H, 16 GPUs at 300 GB/s by NVSwitch, eight 100 Gbps cards per
    # node.
    cluster=_nvidia_node(node_size=16, nvlink=150e9, card=12.5e9),
)
_H100 = Device(
    name="h100-80gb",
    # NVIDIA H100 (SXM) data sheet: 989 TFLOP/s bf16 and 1,979 float8 without sparsity, 67 fp32,
    # 3.35 TB/s, NVLink 900 GB/s in both directions together; H100 whitepaper: 132 multiprocessors,
    # 1.83 GHz at this peak, L2 as in the A100; a cluster of two units loads 2/3 of the bytes that
    # both would load alone.
    memory_bytes=79 * _GIB,
    reserved_bytes=_GIB,
    flops_8=1979e12,
    flops_16=989e12,
    flops_32=67e12,
    memory_bandwidth=3.35e12,
    memory_share=_MEMORY_SHARE,
    product_share=0.803,  # 794.5 TFLOP/s in the table named above
    attention_share=0.38,  # arXiv 2407.08608, section 1: FlashAttention-2 reaches 35 to 40 %
    tuned_attention_share=1.75
    * 0.38,  # ibid.: FlashAttention-3 is 1.5 to 2 times as fast; cuDNN's is measured in addition
    sustained=_SUSTAINED,
    units=132,
    cache_bandwidth=1.5 * 5120 * 1.83e9,
    memory_latency_s=_CYCLES / 1.83e9,
    # NVIDIA DGX H100 data sheet: eight 400 Gbps cards.
    cluster=_nvidia_node(nvlink=450e9, card=50e9),
)
# NVIDIA H200 (SXM) data sheet: an H100 with 141 GB at 4.8 TB/s.
_H200 = replace(_H100, name="h200", memory_bytes=139 * _GIB, memory_bandwidth=4.8e12)
_B200 = replace(
    _H100,
    name="b200",
    # NVIDIA DGX B200 data sheet: 180 GB at 8 TB/s, 2.25 PFLOP/s bf16 and 4.5 float8 without
    # sparsity per GPU, NVLink 1.8 TB/s in both directions together, 400 Gbps cards.
    memory_bytes=178 * _GIB,
    flops_8=4500e12,
    flops_16=2250e12,
    flops_32=80e12,
    memory_bandwidth=8e12,
    product_share=0.776,  # 1,745 TFLOP/s in the table named above
    # FlashAttention-2 does not use Blackwell's instructions, so it is no faster than on an H100.
    attention_share=0.3,
    tuned_attention_share=1.75 * 0.3,
    units=148,
    cache_bandwidth=2 * 1.5 * 5120 * 1.83e9,  # pairs of units multiply tiles of twice the size
    cluster=_nvidia_node(nvlink=900e9, card=50e9),
)
_CPU = Device(
    name="cpu",
    kind="cpu",
    # One core per process, connected by gloo over the loopback device. These are orders of
    # magnitude without a data sheet: calibrate.
    memory_bytes=4 * _GIB,
    flops_16=25e9,
    flops_32=50e9,
    memory_bandwidth=10e9,
    memory_share=1.0,
    product_share=0.8,
    attention_share=0.4,
    units=1,
    cache_bandwidth=1e15,  # a core's tiles fit into its own caches
    memory_latency_s=1e-7,
    cluster=Cluster(
        node_size=64,
        cards=64,
        node=Link(bandwidth=1e9, latency_s=1e-4),
        card=Link(bandwidth=1e9, latency_s=2e-4),
    ),
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (_A100, _A100_40, _A100_PCIE, _V100, _H100, _H200, _B200, _CPU)
    }
)
"""The presets by name."""


def find_device(name: str) -> Device:
    """Return the preset called ``name``, in any case; ``"a100"`` and ``"h100"`` are enough.

    Raises:
        ValueError: There is no such preset. The message names the nearest one.
    """
    prefix = name.lower()
    matches = [
        device for key, device in DEVICES.items() if key == prefix or key.startswith(f"{prefix}-")
    ]
    if matches:
        return matches[0]
    hint = did_you_mean(prefix, DEVICES)
    raise ValueError(f"device={name!r} is unknown. {hint}The devices are {', '.join(DEVICES)}")


def known_device(name: str) -> Device | None:
    """Return the preset of a device by the device's own name, or None.

    Names are of the form "NVIDIA H100 80GB HBM3" or "cpu". If a name has less memory than the
    preset ("Tesla V100-SXM2-16GB"), the device has this memory.
    """
    words = name.lower().replace("-", " ").split()
    matches = [preset for key, preset in DEVICES.items() if key.partition("-")[0] in words]
    # The variant of an A100 follows its name: "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB".
    if not matches:
        return None
    variants = [preset for preset in matches if preset.name.rpartition("-")[2] in words]
    preset = variants[-1] if variants else matches[0]
    sizes = [word.removesuffix("gb") for word in words if word.endswith("gb")]
    for size in filter(str.isdecimal, sizes):
        if int(size) * _GIB < preset.memory_bytes:
            return replace(preset, memory_bytes=_NAMED_SHARE * int(size) * _GIB)
    return preset


def known_peak_flops(device: str, precision: str) -> float | None:
    """Return the dense peak of a GPU from its data sheet, or None if there is no preset.

    Args:
        device: The device's own name for itself.
        precision: Lightning's name of the precision.
    """
    preset = known_device(device)
    if preset is None or preset.name == "cpu":
        return None
    return preset.peak(2 if "16" in precision else 4)
