"""The input of planning: a job (model, devices, batch) and a choice (layout, options)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import get_args

from lightning_ptdp.attention import AttentionKind
from lightning_ptdp.base.option_types import Count, Size, check_types
from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.planner.configured_shape import configured_shape
from lightning_ptdp.planner.devices import Cluster, Device
from lightning_ptdp.planner.shapes import AttentionShape, Bytes, ModelShape
from lightning_ptdp.planner.software import PRECISIONS, SOFTWARE, Precision, Software
from lightning_ptdp.schedule.generators import schedule_placement
from lightning_ptdp.world.layout import ParallelLayout, Sharding

_GIB = 2**30

RESERVE = 0.2
"""Default reserve: published bf16 runs use 17 to 23 % more memory than estimated.

Allocators keep fragments, and libraries keep workspaces.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to be trained on given devices.

    Attributes:
        model: A GPT or BERT of ours, or the shape of any model in this precision
            (``model_trace.py``).
        world_size: Number of processes, one per device.
        global_batch_size: B, sequences in an optimizer step, over all replicas.
        device: Device of each process.
        precision: Precision of weights and arithmetic.
        software: Software that trains the model.
        sequence_length: s in tokens; by default the model's maximum.
        imbalance: Rows of the busiest rank's experts, over the mean. 1 is the aim of load
            balancing, and published benchmarks force it. The metrics of a run show its own value.
        trained: Share of the parameters that are trained. The other parameters are frozen, as with
            adapters.
        offloads_optimizer: The optimizer's states are in the host's memory, which is not counted.
        reserve: Share of a device's usable memory that a layout leaves free, because estimates of
            memory are too low.

    Raises:
        ValueError: A size is not a positive integer, the sequence is longer than the model's
            maximum, or a share is out of range.
    """

    model: GPTConfig | BertConfig | ModelShape
    world_size: Size
    global_batch_size: Size
    device: Device
    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16-true"])
    software: Software = field(default_factory=lambda: SOFTWARE["ours"])
    sequence_length: Count = 0
    imbalance: float = 1.0
    trained: float = 1.0
    offloads_optimizer: bool = False
    reserve: float = RESERVE

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.imbalance < math.inf:
            raise ValueError(
                f"imbalance={self.imbalance!r} must be 1 or more, because it is the busiest "
                "rank's share over the mean"
            )
        if self.software.float8 and self.device.flops_8 is None:
            raise ValueError(
                f"software={self.software.name!r} computes in float8, but the float8 rate of "
                f"{self.device.name} is unknown. Use h100, h200 or b200, or other software"
            )
        if not 0 <= self.trained <= 1:
            raise ValueError(
                f"trained={self.trained!r} must be a share of the parameters, from 0 to 1"
            )
        if not 0 <= self.reserve < 1:
            raise ValueError(
                f"reserve={self.reserve!r} must be a share of the memory, at least 0 and less "
                "than 1"
            )
        if self.sequence_length == 0:
            object.__setattr__(self, "sequence_length", self.model.sequence_length)
        if self.sequence_length > self.model.sequence_length:
            raise ValueError(
                f"sequence_length={self.sequence_length} is longer than the model's "
                f"{self.model.sequence_length}. Use a model with a greater sequence_length"
            )

    @property
    def cluster(self) -> Cluster:
        """Return the links between the devices."""
        return self.device.cluster

    @property
    def limit_bytes(self) -> float:
        """Return the bytes of a device that a layout may use by its estimate."""
        return (1 - self.reserve) * self.device.usable_bytes

    @property
    def room(self) -> str:
        """Return the memory that a layout may take, as ``60 GiB (75 less a reserve of 20%)``."""
        limit = f"{self.limit_bytes / _GIB:.3g} GiB"
        if self.reserve:
            usable = self.device.usable_bytes / _GIB
            return f"{limit} ({usable:.3g} less a reserve of {self.reserve:.0%})"
        return limit

    @property
    def shared_cores(self) -> int:
        """Return the cores that the processes of a node share; 0 if each has its own device."""
        measured = self.device.measured
        return 0 if measured is None else measured.cores

    @property
    def processes(self) -> int:
        """Return the number of processes on a node."""
        return min(self.world_size, self.cluster.node_size)

    @property
    def overlaps(self) -> bool:
        """Return True if collectives run at the same time as computations.

        On a CPU, this requires a free core for the collectives of each process.
        """
        return self.shared_cores == 0 or self.shared_cores >= 2 * self.processes

    @property
    def gradient(self) -> int:
        """Return the bytes per element of a gradient."""
        return self.precision.gradient if self.software.gradient is None else self.software.gradient

    @functools.cached_property
    def shape(self) -> ModelShape:
        """Return the model as a ``ModelShape``, which the time and memory models read."""
        if isinstance(self.model, ModelShape):
            return self.model
        return configured_shape(
            self.model,
            sequence_length=self.sequence_length,
            precision=self.precision,
            software=self.software,
            on_cpu=self.device.kind == "cpu",
        )

    @property
    def snapshot_bytes(self) -> float:
        """Return the bytes of a snapshot in memory on each node: weights and optimizer states.

        ``snapshot_every_n_steps`` needs two of them in ``/dev/shm``, and one in a buffer.
        """
        return self.shape.parameters * (self.precision.weight + self.trained * self.precision.state)

    def fuses(self, attention: AttentionShape) -> bool:
        """Return True if no s x s scores are in memory. torch's CPU kernel has no dropout."""
        composed = self.device.kind == "cpu" and attention.dropout
        return self.software.attention != "unfused" and not composed

    @property
    def tokens(self) -> int:
        """Return the number of tokens in an optimizer step."""
        return self.global_batch_size * self.sequence_length


_DEFAULTS = {
    "schedule": "auto",
    "context_parallel_attention": "ring",
    "recompute": "none",
    "distribute_saved_activations": False,
    "shard": "none",
}
"""Defaults of a choice's options that are not part of the layout."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to lay out a job.

    The names are options of the strategy, except ``micro_batch_size``, which is an option of the
    data.

    Attributes:
        layout: Degrees of parallelism.
        micro_batch_size: b, samples in a microbatch.
        num_microbatches: m, microbatches in a step of a replica.
        schedule: Name of the pipeline schedule.
        context_parallel_attention: "ring" or "all_to_all"; without context parallelism "ring".
        recompute: "none", "selective", "full" or "offload". The memory model of "offload" covers
            only the device, not host memory or the time of copies, so the search does not try it.
        distribute_saved_activations: Keep 1/t of a recomputed block's input.
        shard: What is distributed over the replicas: "none", "optimizer" (states, ZeRO-1),
            "gradients" (and gradients, ZeRO-2), or "parameters" (ZeRO-3: gathered by layers, or
            under a pipeline by chunks).
    """

    layout: ParallelLayout
    micro_batch_size: int
    num_microbatches: int
    schedule: str = "1f1b"
    context_parallel_attention: AttentionKind = "ring"
    recompute: str = "none"
    distribute_saved_activations: bool = False
    shard: Sharding = "none"

    def __post_init__(self) -> None:
        assert self.p == 1 or self.layout.placement == schedule_placement(self.schedule), self

    @property
    def t(self) -> int:
        """Return the tensor-parallel size."""
        return self.layout.tensor_parallel_size

    @property
    def p(self) -> int:
        """Return the pipeline-parallel size."""
        return self.layout.pipeline_parallel_size

    @property
    def v(self) -> int:
        """Return the number of stages of a pipeline rank."""
        return self.layout.virtual_pipeline_size

    @property
    def c(self) -> int:
        """Return the context-parallel size."""
        return self.layout.context_parallel_size

    @property
    def samples(self) -> float:
        """Return the number of samples of a microbatch on one rank: b / c."""
        return self.micro_batch_size / self.c

    def bytes_of(self, sizes: Bytes) -> float:
        """Return the bytes of a microbatch on one rank."""
        replicated = sizes.replicated / (self.t if self.layout.sequence_parallel else 1)
        return (self.micro_batch_size * (replicated + sizes.split / self.t) + sizes.once) / self.c

    def options(self) -> dict[str, object]:
        """Return the arguments of ``PTDPStrategy`` that differ from the defaults.

        ``num_microbatches`` is always included.
        """
        arguments = self.all_options()
        defaults = self.layout.options() | _DEFAULTS
        return {name: value for name, value in arguments.items() if value != defaults.get(name)}

    def all_options(self) -> dict[str, object]:
        """Return the arguments of ``PTDPStrategy`` including defaults.

        A file that sets other values needs all of them.
        """
        chosen = {**vars(self.layout), **vars(self)}
        if self.p == 1:
            chosen["schedule"] = "auto"
        return {
            name: chosen[name] for name in (*self.layout.options(), *_DEFAULTS, "num_microbatches")
        }

    def describe_layout(self) -> str:
        """Return the degrees, and the exchange of context parallelism if it is not the default."""
        exchange = " all-to-all" if self.context_parallel_attention == "all_to_all" else ""
        return self.layout.describe() + exchange

    def describe(self) -> str:
        """Return a short form such as ``t8 p2 d4 sp b1 m16 1f1b full``."""
        parts = [self.describe_layout(), f"b{self.micro_batch_size} m{self.num_microbatches}"]
        if self.p > 1:
            parts.append(self.schedule)
        if self.recompute != "none":
            parts.append(self.recompute + (" 1/t" if self.distribute_saved_activations else ""))
        return " ".join(
            [
                *parts,
                *([] if self.shard == "none" else [f"zero-{get_args(Sharding).index(self.shard)}"]),
            ]
        )
