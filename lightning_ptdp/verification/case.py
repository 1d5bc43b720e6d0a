"""One training of a verification: a layout, the batches, and changes that isolate a cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.engine.microbatches import merge_outputs
from lightning_ptdp.world.axes import AXES
from lightning_ptdp.world.layout import ParallelLayout

_AXES = {
    "t": "tensor_parallel_size sequence_parallel tensor_overlap distribute_saved_activations",
    "p": "pipeline_parallel_size virtual_pipeline_size schedule partition microbatch_group_size "
    "scatter_gather channel_ctas",
    "c": "context_parallel_size context_parallel_attention",
    "e": "expert_parallel_size expert_tensor_parallel_size",
    "d": "shard reduce_dtype data_parallel_replicas inter_node_reduce_dtype "
    "overlap_parameter_gather bucket_mb",
    "m": "num_microbatches micro_batch_size",
    " ": "recompute recompute_layers",
}
"""Options by the axis that they belong to. All other options apply to one process too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        name: Name in error messages.
        config: Options of the strategy.
        devices: Number of processes.
        batches: Batches that each replica reads; empty: the user's loaders are read.
        precision: Precision of the Trainer.
        frozen: True if random numbers are replaced by constants.
        blocks: Number of blocks to keep of each repeated container; None: all.
        disturbed: True if the initial weights are changed by about the rounding of float32.
    """

    name: str
    config: PTDPConfig
    devices: int
    batches: Sequence[Captured] = ()
    precision: Any = None
    frozen: bool = False
    blocks: int | None = None
    disturbed: bool = False

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout on the devices."""
        return self.config.layout(self.devices)

    def only(self, axes: str, devices: int, batches: Sequence[Captured], **options: Any) -> Case:
        """Return the training with some axes of the layout ("": one process), on ``devices``."""
        for axis, names in _AXES.items():
            if axis not in axes:
                options = {name: getattr(PTDPConfig, name) for name in names.split()} | options
        return replace(
            self,
            name=f"{axes} alone" if axes else "one process",
            config=replace(self.config, **options),
            devices=devices,
            batches=batches,
        )


def smaller_layouts(
    case: Case, whole: Captured, *, microbatches: int
) -> Iterator[tuple[str, Case]]:
    """Yield (axes, training) with one axis of the layout at a time.

    Args:
        case: The whole layout.
        whole: Batches of one process.
        microbatches: Number of microbatches in one batch of a replica.
    """
    layout = case.layout
    replicas = layout.num_replicas
    count = microbatches * replicas // whole.parts
    if microbatches > 1 or replicas > 1:
        yield "m", case.only("m", 1, [whole], micro_batch_size=None, num_microbatches=max(count, 2))
    for axis in AXES:
        size = layout.size(axis.name)
        if axis.reads != "samples" and size > 1:
            options = {"num_microbatches": count} if axis.name == "pipeline" else {}
            yield axis.letter, case.only(axis.letter, size, [whole], **options)
    if replicas > 1:
        axes = "de" if layout.size("expert") > 1 else "d"
        yield axes, case.only(axes, replicas, case.batches)


# ---- Captured batches of a layout's replicas, to replay in one process and in other layouts ------


@dataclass(kw_only=True)
class Captured:
    """Batches of one replica.

    Attributes:
        lists: ("train", epoch) or ("validation", loader) -> batches.
        length: Number of batches in a whole training epoch; infinite if the loader has no length.
        parts: Number of batches that make up one batch of the layout.
    """

    lists: dict[tuple[str, int], list[Nested]] = field(default_factory=dict)
    length: float = math.inf
    parts: int = 1


def combine(replicas: Sequence[Captured], *, joined: bool) -> Captured:
    """Return the batches of all replicas, joined to one batch each or in sequence.

    Raises:
        ValueError, RuntimeError: The batches cannot be joined.
    """
    lists: dict[tuple[str, int], list[Nested]] = {}
    for key in replicas[0].lists:
        groups = zip(*(replica.lists.get(key, ()) for replica in replicas), strict=False)
        lists[key] = [batch for parts in groups for batch in ([_join(parts)] if joined else parts)]
    count = 1 if joined else len(replicas)
    return Captured(lists=lists, length=replicas[0].length * count, parts=count)


@dataclass(frozen=True)
class Replay:
    """A loader of captured batches.

    Attributes:
        batches: Function that returns the batches of an epoch.
        length: Number of these batches; infinite if it is unknown.
    """

    batches: Callable[[], Iterable[Nested]]
    length: Any

    def __len__(self) -> int:
        return self.length  # Infinity raises a TypeError, like any loader without a length.

    def __iter__(self) -> Iterator[Nested]:
        return iter(self.batches())


def _join(parts: Sequence[Nested]) -> Nested:
    if len(parts) == 1:
        return parts[0]
    sizes = [batch_size(part) for part in parts]
    merged = merge_outputs(parts, sizes, sizes)
    if batch_size(merged) != sum(sizes):
        raise ValueError("they have values other than tensors with the samples along dimension 0")
    return merged
