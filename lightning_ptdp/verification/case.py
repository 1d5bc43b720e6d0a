"""One training of a verification: a layout, and what is changed in it to find a cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["Case", "smaller_layouts"]

_AXES = {
    "t": "tensor_parallel_size sequence_parallel tensor_overlap distribute_saved_activations",
    "p": "pipeline_parallel_size virtual_pipeline_size schedule partition microbatch_group_size scatter_gather channel_ctas",
    "c": "context_parallel_size context_parallel_attention",
    "e": "expert_parallel_size expert_tensor_parallel_size",
    "d": "shard_optimizer reduce_dtype data_parallel_replicas inter_node_reduce_dtype overlap_parameter_gather bucket_mb",
    "m": "num_microbatches micro_batch_size",
    " ": "recompute recompute_layers",
}
"""Options by the axis that they belong to; all others hold in one process too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        name: In the report.
        config: The strategy's options.
        devices: Number of processes.
        precision: The Trainer's.
        reads: "loader" (the user's), "replicas" (what each replica of the first training read) or "joined".
        accumulates: Replicas whose batches one process accumulates over, because they cannot be joined.
        frozen: Whether random numbers are replaced by constants.
        blocks: Number of blocks that are kept of each repeated container; None: all.
    """

    name: str
    config: PTDPConfig
    devices: int
    precision: Any = None
    reads: str = "loader"
    accumulates: int = 1
    frozen: bool = False
    blocks: int | None = None

    @property
    def layout(self) -> ParallelLayout:
        """The degrees on the devices."""
        return self.config.layout(self.devices)

    def one_process(self, *, accumulates: int) -> Case:
        """Return the same training without parallelism."""
        return replace(self.only("", 1), name="one process", accumulates=accumulates)

    def only(self, letters: str, devices: int, *, microbatches: int | None = None) -> Case:
        """Return the training with some axes of the layout, on ``devices``."""
        options: dict[str, Any] = {each.name: each.default for each in fields(PTDPConfig)}
        kept = " ".join(names for letter, names in _AXES.items() if letter in letters).split()
        dropped = {name: options[name] for name in " ".join(_AXES.values()).split() if name not in kept}
        if microbatches is not None:
            dropped |= {"num_microbatches": microbatches, "micro_batch_size": None}
        return replace(self, config=replace(self.config, **dropped), devices=devices, reads="joined", name=f"{letters} alone")


def smaller_layouts(case: Case, *, microbatches: int, accumulates: int) -> Iterator[tuple[str, Case]]:
    """Yield (axes, training) with one axis of the layout at a time.

    Args:
        case: The whole layout.
        microbatches: Of one step of a replica.
        accumulates: As in ``Case``; else the batches of all replicas are joined and have the microbatches of all.
    """
    layout, replicas = case.layout, case.layout.num_replicas
    count = microbatches if accumulates > 1 else microbatches * replicas
    if microbatches > 1 or replicas > 1:
        yield "m", replace(case.only("m", 1, microbatches=max(count, 2)), accumulates=accumulates)
    for letters, number in (("t", None), ("p", count), ("c", None)):
        size = layout.size({"t": "tensor", "p": "pipeline", "c": "context"}[letters])
        if size > 1:
            yield letters, replace(case.only(letters, size, microbatches=number), accumulates=accumulates)
    if replicas > 1:
        letters = "de" if layout.size("expert") > 1 else "d"
        yield letters, replace(case.only(letters, replicas), reads="replicas")
