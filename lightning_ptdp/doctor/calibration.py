"""Calibration: speed of this machine's devices, measured for the planner.

The measurements run in the processes that training would have. All ranks measure at the same time,
because they share caches, memory and power. The slowest rank counts. Everything is measured in
several rounds, each with a median. The result is the median over the rounds, so that a busy moment
of the machine spoils only one of them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_ptdp.base.forked_processes import Tell
from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.doctor.links import GroupMember, Links, measure_links, usual_s
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.models.memory_saving import RMSNorm, swiglu
from lightning_ptdp.planner import (
    SOFTWARE,
    Cluster,
    Device,
    Link,
    Measured,
    find_device,
    known_device,
)
from lightning_ptdp.shims.glibc import Heap
from lightning_ptdp.tensor_parallel import vocabulary_parallel_cross_entropy
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from lightning_ptdp.world.mesh import Group

_SIDES = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
_POSITIONS = {"cpu": (128, 256, 512, 2048), "cuda": (512, 2048, 8192)}
_CHANNELS = (32, 64, 128)
_ROUNDS = 3
_BUDGET_S = 0.04
_TOKENS = 256
_WIDTH = 512
_WORDS = 8192
_PARAMETERS = 2**20
_GIB = 2**30

_Run = Callable[[], object]
_Key = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Device and measurements of one rank.

    Attributes:
        name: The device's own name.
        kind: "cpu" or "cuda".
        memory_bytes: Memory of a process in bytes.
        cores: Cores that all processes share; 0 if each has a GPU.
        seconds: Seconds of each run by its key.
        links: Measurements of the collectives between ranks.
    """

    name: str
    kind: str
    memory_bytes: float
    cores: int
    seconds: Mapping[_Key, float]
    links: Links


def measure_device(place: GroupMember, tell: Tell) -> Figures:
    """Measure the device of this rank.

    Collective: all ranks call it at the same time.
    """
    device = place.device
    kind = device.type
    times: dict[_Key, list[float]] = defaultdict(list)
    # A thread's clock does not count other programs.
    clock = time.thread_time if kind == "cpu" else time.perf_counter
    # As in a training on a CPU.
    with closing(Heap()) if kind == "cpu" else nullcontext():
        for number in range(_ROUNDS):
            if place.size > 1:
                dist.barrier()
            for key, make in _runs(kind):
                tell(f"{' '.join(map(str, key))}, round {number + 1} of {_ROUNDS}")
                with device:
                    run = make()
                times[key].append(usual_s(device, run, budget_s=_BUDGET_S, clock=clock))
    cores = 0
    if kind == "cuda":
        memory_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        cores = len(os.sched_getaffinity(0))
        memory_bytes = psutil.virtual_memory().total / place.size
    return Figures(
        name=device_name(device),
        kind=kind,
        memory_bytes=memory_bytes,
        cores=cores,
        seconds={key: median(rounds_s) for key, rounds_s in times.items()},
        links=measure_links(place, tell, cores=cores),
    )


def calibrated(figures: Sequence[Figures]) -> Device:
    """Return the device that follows from all ranks' figures. The slowest rank counts."""
    first = figures[0]
    kind = first.kind
    preset = (
        find_device("cpu") if kind == "cpu" else known_device(first.name) or find_device("h100")
    )
    slowest = {key: max(item.seconds[key] for item in figures) for key in first.seconds}
    products = [
        (m, n, k, 2 * m * n * k / slowest["product", m, n, k])
        for m, n, k in itertools.product(_SIDES[kind], repeat=3)
    ]
    best = max(rate for *_, rate in products)
    side = _SIDES[kind][1]
    other_rate = best * slowest["product", side, side, side] / slowest["other",]
    single, half = (best, other_rate) if kind == "cpu" else (other_rate, best)
    width = 4 if kind == "cpu" else 2
    attention = []
    for positions, channels in itertools.product(_POSITIONS[kind], _CHANNELS):
        square = 4 * _heads(positions) * positions**2 * channels
        forward_rate, backward_rate = (
            square / slowest[label, positions, channels] for label in ("attention", "its backward")
        )
        attention.append((positions, channels, forward_rate, 2.5 * backward_rate))
    stream, gated = (
        _TOKENS * count * width / slowest[activation,]
        for activation, count in (("gelu", _GELU), ("gated", _GATED))
    )
    return replace(
        preset,
        name=first.name,
        memory_bytes=first.memory_bytes,
        reserved_bytes=_GIB if kind == "cuda" else 0.0,
        flops_16=half,
        flops_32=single,
        memory_bandwidth=stream,
        memory_share=1.0,
        product_share=1.0,
        sustained=1.0,
        attention_share=min(1.0, attention[-1][2] / 2 / best),
        measured=Measured(
            processes=len(figures),
            cores=first.cores,
            products=tuple(products),
            attention=tuple(attention),
            gated=gated,
            loss=_TOKENS * _WORDS * SOFTWARE["ours"].loss / slowest["loss",],
            optimizer=32 * _PARAMETERS / slowest["optimizer",],
            operation_s=slowest["host",] / (3 * SOFTWARE["ours"].operations),
            waiting=first.links.waiting,
        ),
        cluster=_cluster(preset.cluster, figures),
    )


def describe(device: Device) -> str:
    """Return the measurements as a few lines of text."""
    measured = device.measured
    assert measured is not None
    rates = sorted(rate for *_, rate in measured.products)
    attention_rates = sorted(rate for *_, rate, _ in measured.attention)
    products, attention = (
        f"{ordered[0] / 1e9:.3g} to {ordered[-1] / 1e9:.3g}" for ordered in (rates, attention_rates)
    )
    shared = f" on {measured.cores} cores" if measured.cores else ""
    lines = [
        f"{device.name}, {measured.processes} "
        f"{'process' if measured.processes == 1 else 'processes'}{shared}",
        f"  products {products} GFLOP/s by shape, attention {attention}",
        f"  between products {device.stream / 1e9:.3g} GB/s (SwiGLU {measured.gated / 1e9:.3g}), "
        f"loss {measured.loss / 1e9:.3g}, optimizer {measured.optimizer / 1e9:.3g}",
        f"  {measured.operation_s * 1e6:.3g} us per operation",
    ]
    for operation, members, nbytes, seconds in device.cluster.collectives:
        if nbytes == 2**20:
            group = f" among {members}" if members else ""
            lines.append(f"  {operation} of 1 MiB{group}: {seconds * 1e3:.3g} ms")
    return "\n".join(lines)


def _cluster(preset: Cluster, figures: Sequence[Figures]) -> Cluster:
    """Return a cluster with the measured collectives.

    For larger groups, the node's links follow from the smallest and the largest all-reduce of all
    ranks, which has 2 (n - 1) steps.
    """
    count = len(figures)
    links = [item.links.seconds for item in figures]
    slowest = {key: max(item[key] for item in links if key in item) for key in links[0]}
    sums = sorted(
        (size, seconds)
        for (name, members, size), seconds in slowest.items()
        if (name, members) == ("all-reduce", count)
    )
    if len(sums) < 2:
        return preset
    (small, start), (large, end) = sums[0], sums[-1]
    share = 2 * (count - 1) / count
    bandwidth = share * (large - small) / max(end - start, 1e-9)
    latency = max(0.0, start - share * small / bandwidth) / (2 * (count - 1))
    return replace(
        preset,
        node=Link(bandwidth=bandwidth, latency_s=latency),
        start_s=0.0,
        node_size=max(count, preset.node_size),
        collectives=tuple((*key, seconds) for key, seconds in sorted(slowest.items())),
    )


# The planner's counts for these operations (planner/operation_recorder.py), in elements per token:
# two norms 2 x (3 + 7 passes), two sums 2 x 3 and the activation, 2 + 3 passes of GELU's channels,
# which are four times as wide, or 5 + 9 of SwiGLU's.
_GELU = _WIDTH * (2 * (3 + 7 + 3) + 4 * (2 + 3))
_GATED = _WIDTH * (2 * (3 + 7 + 3) + 2 * (5 + 9))


def _runs(kind: str) -> Iterator[tuple[_Key, Callable[[], _Run]]]:
    """Yield the key of each measurement, and a function that makes its run on torch's device."""
    dtype, other_dtype = torch.bfloat16, torch.float32
    if kind == "cpu":
        dtype, other_dtype = torch.float32, torch.bfloat16
    sides = _SIDES[kind]
    for m, n, k in itertools.product(sides, repeat=3):
        yield ("product", m, n, k), partial(_product, m, n, k, dtype)
    yield ("other",), partial(_product, sides[1], sides[1], sides[1], other_dtype)
    for shape in itertools.product(_POSITIONS[kind], _CHANNELS):
        yield ("attention", *shape), partial(_attention, *shape, dtype)
        yield ("its backward", *shape), partial(_attention_backward, *shape, dtype)
    yield ("gelu",), partial(_between_products, dtype, gated=False)
    yield ("gated",), partial(_between_products, dtype, gated=True)
    yield ("loss",), _loss
    yield ("optimizer",), _optimizer
    yield ("host",), _small


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> _Run:
    a = torch.randn(m, k).to(dtype)
    b = torch.randn(k, n).to(dtype)
    result = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=result)


def _heads(positions: int) -> int:
    return max(2, 2048 // positions)


def _attention(positions: int, channels: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    shape = (1, _heads(positions), positions, channels)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_backward(positions: int, channels: int, dtype: torch.dtype) -> _Run:
    result = _attention(positions, channels, dtype)()
    gradient = torch.randn_like(result)
    return lambda: result.backward(gradient, retain_graph=True)


def _between_products(dtype: torch.dtype, *, gated: bool) -> _Run:
    """Return a run of a layer's two norms, two sums and activation, forward and backward."""
    x = torch.randn(_TOKENS, _WIDTH, dtype=dtype, requires_grad=True)
    inner = torch.randn(_TOKENS, 4 * _WIDTH, dtype=dtype, requires_grad=True)
    norm = (RMSNorm(_WIDTH, eps=1e-5) if gated else torch.nn.LayerNorm(_WIDTH)).to(dtype)
    stream = torch.randn_like(x)
    wide = torch.randn_like(inner[:, : (2 if gated else 4) * _WIDTH])

    def run() -> None:
        y = norm(x) + x
        z = norm(y) + y
        activated = swiglu(inner) if gated else F.gelu(inner, approximate="tanh")
        torch.autograd.backward([z, activated], [stream, wide])

    return run


def _loss() -> _Run:
    logits = torch.randn(_TOKENS, _WORDS, requires_grad=True)
    targets = torch.randint(_WORDS, (_TOKENS,))
    words = VocabularyRange(size=_WORDS)
    return lambda: vocabulary_parallel_cross_entropy(
        logits, targets, vocabulary=words, group=Group()
    ).backward()


def _optimizer() -> _Run:
    parameters = [torch.randn(_PARAMETERS // 4, requires_grad=True) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        optimizer.step()

    return run


def _small() -> _Run:
    """Return a run of a block that is so small that only the launch of operations takes time."""
    config = GPTConfig.gpt2(
        vocabulary_size=8, sequence_length=8, num_layers=1, hidden_size=16, num_heads=2
    )
    block = GPT(config).blocks[0]
    x = torch.randn(1, 4, 16, requires_grad=True)
    return lambda: block(x).sum().backward()
