"""What this machine's devices reach, measured in the processes that training would have, for the planner.

Every rank measures at the same time, since they share caches, memory and power; the slowest of each counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_ptdp.doctor.bandwidth import Measurement
from lightning_ptdp.doctor.collectives import Place
from lightning_ptdp.doctor.processes import Tell
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.planner import SOFTWARE, Cluster, Device, Link, find_device, known_device

__all__ = ["Figures", "calibrated", "measure_device", "memory_of"]

_SIDES = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
_BUDGET_S = 0.15
_MOST, _LEAST = 50, 3
_TOKENS, _CHANNELS, _HEADS, _LENGTH = 1024, 512, 8, 512
_GIB = 2**30
_CUDA_RESERVED = 4 * _GIB


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one rank measured.

    Attributes:
        products: (m, n, k, operations a second), in the precision that the device is for: fp32 on a CPU, bf16 on a GPU.
        other: Operations a second in the other precision, of the middle shape.
        stream: Bytes a second of a norm, a GELU and a sum, forward and backward.
        attention: Operations a second of the fused attention, as if its backward took 2.5 forwards.
        operation_s: Seconds of the host for an operation.
    """

    products: tuple[tuple[int, int, int, float], ...]
    other: float
    stream: float
    attention: float
    operation_s: float


def measure_device(place: Place, tell: Tell) -> Figures:
    """Collective; every rank measures the same at the same time."""
    device = place.device
    usual, other = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16, torch.float32)
    products = []
    for m, n, k in itertools.product(_SIDES[device.type], repeat=3):
        tell(f"a product of {m} x {k} and {k} x {n}")
        products.append((m, n, k, _rate(place, m, n, k, usual)))
    side = _SIDES[device.type][1]
    tell("norms, GELU and sums")
    stream = _stream(place, usual)
    tell("attention")
    attention = _attention(place, usual)
    tell("small operations")
    return Figures(
        products=tuple(products),
        other=_rate(place, side, side, side, other),
        stream=stream,
        attention=attention,
        operation_s=_host(place),
    )


def calibrated(
    name: str, figures: Sequence[Figures], measurements: Sequence[Measurement], *, kind: str, memory_bytes: float
) -> Device:
    """The device that all ranks' figures make, the slowest of each.

    Args:
        name: What it calls itself.
        figures: Of each rank.
        measurements: Of collectives between them; empty where there is one.
        kind: "cpu" or "cuda".
        memory_bytes: Of a process.
    """
    preset = find_device("cpu") if kind == "cpu" else known_device(name) or find_device("h100")
    shapes = [product[:3] for product in figures[0].products]
    rates = [min(one.products[i][3] for one in figures) for i in range(len(shapes))]
    best, middle = max(rates), rates[len(rates) // 2]
    other = best * min(one.other for one in figures) / middle
    single, half = (best, other) if kind == "cpu" else (other, best)
    stream = min(one.stream for one in figures)
    return replace(
        preset,
        name=name,
        memory_bytes=memory_bytes,
        reserved_bytes=_CUDA_RESERVED if kind == "cuda" else 0.0,
        flops_16=half,
        flops_32=single,
        memory_bandwidth=stream,
        memory_share=1.0,
        product_share=1.0,
        sustained=1.0,
        attention_share=min(1.0, min(one.attention for one in figures) / best),
        products=tuple((*shape, rate) for shape, rate in zip(shapes, rates, strict=True)),
        operation_s=max(one.operation_s for one in figures),
        cluster=_cluster(preset.cluster, measurements, len(figures)),
    )


def _cluster(preset: Cluster, measurements: Sequence[Measurement], count: int) -> Cluster:
    """The node's links from the smallest and the largest all-reduce: 2 (n - 1) steps."""
    sums = sorted((one.size, one.seconds) for one in measurements if one.operation == "all-reduce")
    if len(sums) < 2:
        return preset
    (small, start), (large, whole) = sums[0], sums[-1]
    share = 2 * (count - 1) / count
    bandwidth = share * (large - small) / max(whole - start, 1e-9)
    latency = max(0.0, start - share * small / bandwidth) / (2 * (count - 1))
    return replace(preset, node=Link(bandwidth=bandwidth, latency_s=latency), start_s=0.0, node_size=max(count, preset.node_size))


def _rate(place: Place, m: int, n: int, k: int, dtype: torch.dtype) -> float:
    a = torch.randn(m, k, device=place.device).to(dtype)
    b = torch.randn(k, n, device=place.device).to(dtype)
    return 2 * m * n * k / _median(place, lambda: a @ b)


def _stream(place: Place, dtype: torch.dtype) -> float:
    """The bytes are those that the planner counts (planner/elementwise.py): a norm 5 + 9 passes, a GELU 2 + 3, a sum 3."""
    x = torch.randn(_TOKENS, _CHANNELS, device=place.device, dtype=dtype, requires_grad=True)
    weight = torch.ones(_CHANNELS, device=place.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)

    def run() -> None:
        (F.gelu(F.layer_norm(x, (_CHANNELS,), weight), approximate="tanh") + x).backward(gradient)

    passes = 3 + 7 + 2 + 3 + 3 + 3
    return passes * x.nbytes / _median(place, run)


def _attention(place: Place, dtype: torch.dtype) -> float:
    shape = (2, _HEADS, _LENGTH, _CHANNELS // _HEADS)
    q, k, v = (torch.randn(shape, device=place.device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=place.device, dtype=dtype)
    operations = 3.5 * 4 * shape[0] * _LENGTH**2 * _CHANNELS / 2
    return operations / _median(place, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient))


def _host(place: Place) -> float:
    """Of a block that is too small for anything else."""
    block = GPT(GPTConfig.gpt2(vocabulary_size=8, sequence_length=8, num_layers=1, hidden_size=16, num_heads=2)).blocks[0]
    block.to(place.device)
    x = torch.randn(1, 4, 16, device=place.device, requires_grad=True)
    return _median(place, lambda: block(x).sum().backward(), synchronized=False) / (3 * SOFTWARE["ours"].operations)


def _median(place: Place, run: Callable[[], object], *, synchronized: bool = True) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        if synchronized and place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        return max(time.perf_counter() - start, 1e-9)

    run()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    repetitions = min(max(int(_BUDGET_S / seconds()), _LEAST), _MOST)
    if place.size > 1:
        dist.barrier()
    return sorted(seconds() for _ in range(repetitions))[repetitions // 2]


def memory_of(device: torch.device, processes: int) -> float:
    """Bytes that a process can have."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / processes
