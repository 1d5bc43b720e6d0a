"""Figures of devices and of the links between them, published or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lightning_ptdp.base.option_types import Count, Size, check_types


@dataclass(frozen=True, kw_only=True)
class Link:
    """The alpha-beta model of a connection.

    A message of x bytes takes ``latency_s + x / bandwidth``.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency_s: Seconds until the first byte arrives.
    """

    bandwidth: float
    latency_s: float

    def __post_init__(self) -> None:
        check_types(self)
        if not (self.bandwidth > 0 and self.latency_s >= 0):
            raise ValueError(
                f"bandwidth={self.bandwidth!r} must be greater than 0, and "
                f"latency_s={self.latency_s!r} must not be negative"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Links between devices: fast links inside a node, network cards between nodes.

    Attributes:
        node_size: Devices per node.
        cards: Network cards per node, shared by its devices.
        node: Link from a device to the other devices of its node.
        card: Link of one network card to a card of another node; the slower of the card and of the
            switches between them.
        start_s: Seconds of a collective before its first step.
        collectives: Measurements inside a node, which replace the estimates: (operation, members of
            the group, bytes, seconds); 0 members for messages.
    """

    node_size: Size
    cards: Size
    node: Link
    card: Link
    start_s: float = 0.0
    collectives: tuple[tuple[str, int, int, float], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if not self.start_s >= 0:
            raise ValueError(f"start_s={self.start_s!r} must not be negative")
        if any(not (nbytes > 0 and seconds > 0) for *_, nbytes, seconds in self.collectives):
            raise ValueError(
                f"collectives={self.collectives!r:.80} must take longer than 0 seconds"
            )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: Name in tables.
        kind: torch's name for this kind of device.
        memory_bytes: Most memory that a process can allocate.
        reserved_bytes: Part of it that the driver and the libraries' workspaces take.
        flops_16: Peak operations per second of dense matrix products in bf16 or fp16, accumulated
            in fp32.
        flops_8: Peak operations per second in float8; None if the device has no float8.
        flops_32: Peak operations per second in fp32, as torch computes it by default (without
            TF32).
        memory_bandwidth: Bytes per second of the device's own memory.
        memory_share: Share of this bandwidth that operations reach which only read and write.
        product_share: Share of the peak that the best matrix product reaches while it runs.
        attention_share: Share of the peak that the forward of FlashAttention-2 reaches, which torch
            includes.
        tuned_attention_share: Share of the peak for a kernel that uses the device's own
            instructions; None if no such kernel is faster.
        sustained: Share of these rates, each measured alone, that long training reaches. Power
            limits slow the device, and concurrent work slows its memory.
        units: Multiprocessors, the number of tiles of a product that are computed at a time.
        cache_bandwidth: Bytes per second from the shared cache to all units, which makes small
            tiles slow.
        memory_latency_s: Seconds of a read that misses the caches. A tile waits for it before its
            first multiplication and after its last.
        cluster: Links between several devices.
        measured: Measurements of the device, which replace these figures
            (``calibrated_device.py``).

    Raises:
        ValueError: A number is not positive, or a share is above 1.
    """

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: float
    reserved_bytes: float = 0.0
    flops_8: float | None = None
    flops_16: float
    flops_32: float
    memory_bandwidth: float
    memory_share: float
    product_share: float
    attention_share: float
    tuned_attention_share: float | None = None
    sustained: float = 1.0
    units: Size
    cache_bandwidth: float
    memory_latency_s: float
    cluster: Cluster
    measured: Measured | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float):
                continue
            if field.name != "reserved_bytes" and not value > 0:
                raise ValueError(f"{field.name}={value!r} must be greater than 0")
            if (field.name.endswith("_share") or field.name == "sustained") and value > 1:
                raise ValueError(
                    f"{field.name}={value!r} must be a share of the peak between 0 and 1"
                )
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ValueError(
                f"reserved_bytes={self.reserved_bytes!r} must be at least 0 and less than "
                f"memory_bytes={self.memory_bytes!r}"
            )

    @property
    def usable_bytes(self) -> float:
        """Return the memory that training can use, in bytes."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def stream(self) -> float:
        """Return the bytes per second of operations that only read and write."""
        return self.memory_bandwidth * self.memory_share * self.sustained

    def peak(self, element_bytes: int) -> float:
        """Return the peak operations per second for elements of 1, 2 or 4 bytes."""
        if element_bytes == 1:
            return self.flops_8 or self.flops_16
        return self.flops_16 if element_bytes == 2 else self.flops_32


# ---- Measurements of ``ptdp doctor --calibrate`` -------------------------------------------------
#
# They replace the figures of a data sheet and assumed shares of them.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured figures of a device.

    Every figure was measured in the processes that training would have. As many processes were busy
    as there are cores.

    Attributes:
        processes: Number of processes.
        cores: Cores that the processes of a node share; 0 if each has its own device.
        products: Matrix products: (m, n, k, operations per second).
        attention: The fused causal kernel: (positions, channels of a head, operations per second of
            the forward, and of the backward). Operations are those of the full square, and the
            backward counts as 2.5 forwards.
        gated: Bytes per second of the operations between the products of a layer with RMSNorm and
            SwiGLU; ``Device.stream`` is that of a layer with LayerNorm and GELU. Bytes are those
            that the planner counts, here and below.
        loss: Bytes per second of the loss and its backward.
        optimizer: Bytes per second of an optimizer step.
        operation_s: Seconds of the host per operation.
        waiting: Share of a core that a rank uses while it waits for a collective. Separate threads
            receive, sum and send.

    Raises:
        ValueError: A figure is not positive.
    """

    processes: Size
    cores: Count = 0
    products: tuple[tuple[int, int, int, float], ...]
    attention: tuple[tuple[int, int, float, float], ...]
    gated: float
    loss: float
    optimizer: float
    operation_s: float
    waiting: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = (
                [item for row in value for item in row] if isinstance(value, tuple) else [value]
            )
            zero = field.name in ("cores", "waiting")
            if any(not (item > 0 or (zero and item == 0)) for item in numbers):
                raise ValueError(f"{field.name}={value!r:.80} must be greater than 0")
        if not self.products or not self.attention:
            raise ValueError("products and attention must not be empty")

    def product_rate(self, m: int, n: int, k: int) -> float:
        """Return the operations per second for a product.

        The rate is interpolated between the nearest measured shapes on a logarithmic scale.
        """
        return _between([(shape, rate) for *shape, rate in self.products], (m, n, k))

    def attention_rates(self, positions: int, channels: int) -> tuple[float, float]:
        """Return the operations per second of an attention's forward and of its backward.

        The rates are interpolated like ``product_rate``.
        """
        target = (positions, channels)
        forward = _between([(shape, forward) for *shape, forward, _ in self.attention], target)
        return forward, _between(
            [(shape, backward) for *shape, _, backward in self.attention], target
        )


def _between(points: Sequence[tuple[Sequence[int], float]], target: Sequence[int]) -> float:
    by_distance = sorted(
        (sum(math.log2(a / b) ** 2 for a, b in zip(target, shape, strict=True)), rate)
        for shape, rate in points
    )
    weights = [(1 / (distance + 1e-3) ** 2, rate) for distance, rate in by_distance[:4]]
    return math.exp(
        sum(weight * math.log(rate) for weight, rate in weights)
        / sum(weight for weight, _ in weights)
    )
