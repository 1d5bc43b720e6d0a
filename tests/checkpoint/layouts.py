"""Full tensors and the shards that each rank of a layout holds, without the strategy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.checkpoint import save_checkpoint
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.tensor_shards import (
    VocabularyRange,
    shard_columns,
    shard_vocabulary,
)

PADDING = -7
# query, key and value rows of one fused matrix: each part is split over the tensor ranks
FUSED_PARTS = (
    8,
    4,
    4,
)


@dataclass(frozen=True)
class Layout:
    """Layout of world = d * t * p ranks, tensor innermost, pipeline outermost."""

    world: int
    t: int = 1
    p: int = 1

    def __str__(self) -> str:
        return f"t{self.t}p{self.p}d{self.world // self.t // self.p}"


LAYOUTS = [
    Layout(1),
    Layout(2, t=2),
    Layout(2, p=2),
    Layout(2),
    Layout(4, t=4),
    Layout(4, t=2, p=2),
    Layout(4, t=2),
]


def full_model(*, offset: int = 0) -> dict[str, tuple[torch.Tensor, str]]:
    """Return name -> (full tensor with distinct values, kind of sharding)."""

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count) + offset).reshape(shape).to(dtype)

    return {
        "model/wte.weight": (values(29, 6), "vocabulary"),
        "model/h.0.qkv.weight": (values(16, 6) + 1000, "fused"),
        "model/h.0.qkv.bias": (values(16) + 2000, "fused"),
        "model/h.0.proj.weight": (values(6, 8) + 3000, "row"),
        "model/h.0.ln.weight": (values(6, dtype=torch.bfloat16), "replicated"),
        "model/h.1.fc.weight": (values(8, 6, dtype=torch.bfloat16) + 0.5, "column"),
        "model/h.1.steps": (values(12, dtype=torch.int64) + 2**40, "column"),
        "model/h.1.scale": (torch.tensor(0.1 + offset, dtype=torch.float64), "replicated"),
        "model/h.1.empty": (torch.zeros(0, 3), "replicated"),
    }


def shard(full: torch.Tensor, kind: str, *, size: int, rank: int) -> tuple[torch.Tensor, Placement]:
    """Return the local tensor of tensor rank ``rank`` of ``size``, and its placement.

    Local elements outside every piece are ``PADDING``.
    """
    match kind:
        case "column":
            sharding = shard_columns(full.shape, parts=[full.shape[0]], size=size, index=rank)
        case "fused":
            sharding = shard_columns(full.shape, parts=FUSED_PARTS, size=size, index=rank)
        case "row":
            sharding = shard_columns(full.shape, parts=full.shape[1:], size=size, index=rank, dim=1)
        case "vocabulary":
            sharding = shard_vocabulary(
                full.shape, VocabularyRange(size=full.shape[0], parts=size, index=rank)
            )
        case _:
            sharding = Placement.replicated(full.shape)
    local = torch.full(sharding.local_shape, PADDING, dtype=full.dtype)
    for piece in sharding.pieces:
        local[piece.in_local.slices] = full[piece.in_full.slices]
    return local, sharding


def held(
    layout: Layout, rank: int, *, offset: int = 0
) -> dict[str, tuple[torch.Tensor, Placement]]:
    """Return the shards of the full model that ``rank`` holds.

    With two stages, block 1 is in the last stage and everything else in the first.
    """
    found = {}
    for name, (full, kind) in full_model(offset=offset).items():
        stage = 1 if ".h.1." in name.replace("/", ".") else 0
        if layout.p == 1 or stage == rank // (layout.world // layout.p):
            found[name] = shard(full, kind, size=layout.t, rank=rank % layout.t)
    return found


def blank(
    tensors: dict[str, tuple[torch.Tensor, Placement]],
) -> dict[str, tuple[torch.Tensor, Placement]]:
    """Return the same tensors, filled with the padding value."""
    return {
        name: (torch.full_like(tensor, PADDING), sharding)
        for name, (tensor, sharding) in tensors.items()
    }


def replicated(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, Placement]]:
    """Return parameters that every rank holds in full."""
    return {
        f"model/{name}": (value, Placement.replicated(tuple(value.shape)))
        for name, value in values.items()
    }


def save(
    path: Path,
    values: Mapping[str, torch.Tensor] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Save parameters that every rank holds in full, with ``state`` and ``metadata``."""
    tensors = replicated(values or {})
    save_checkpoint(path, tensors=tensors, state=state or {}, metadata=metadata or {})
    return path
