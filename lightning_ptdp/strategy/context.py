"""What stands for torch's functions while a step runs: made for a rank, and refused where it can be seen to be impossible."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.context_parallel import ContextParallel, check_heads, why_not
from lightning_ptdp.keyed_dropout import KeyedDropout
from lightning_ptdp.mesh import ProcessMesh

__all__ = ["check_context_parallel", "make_context_parallel", "make_keyed_dropout"]

_HEADS = ("num_heads", "num_attention_heads", "n_head")


def make_context_parallel(config: PTDPConfig, mesh: ProcessMesh) -> ContextParallel | None:
    """What cuts batches along time on this rank; None if nothing does."""
    group = mesh.group("context")
    if group.size == 1:
        return None
    return ContextParallel(
        group=group,
        attention=config.context_parallel_attention,
        sequence_dims=config.sequence_dims or {},
        needs_positions=config.context_parallel_positions,
        sequence_parallel_size=config.tensor_parallel_size if config.sequence_parallel else 1,
    )


def make_keyed_dropout(config: PTDPConfig, mesh: ProcessMesh, seed: int) -> KeyedDropout | None:
    """What drops the same in every layout; None if nothing does."""
    if not config.keyed_dropout:
        return None
    return KeyedDropout(
        tensor=mesh.group("tensor"), context=mesh.group("context"), sequence_parallel=config.sequence_parallel, seed=seed
    )


def check_context_parallel(model: nn.Module, config: PTDPConfig) -> None:
    """Check what a whole, uncut model tells of its attention.

    Raises:
        ValueError: Its attention cannot be intercepted, or its heads do not divide (all-to-all attention).
    """
    if config.context_parallel_size == 1:
        return
    reason = why_not(model)
    if reason is not None:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size} cannot run this model: {reason}; or use context_parallel_size=1"
        )
    for module in model.modules():
        described: Any = getattr(module, "config", None)
        heads = next((n for key in _HEADS if isinstance(n := getattr(described, key, None), int)), None)
        if heads is not None and config.context_parallel_attention == "all_to_all":
            check_heads(max(1, heads // config.tensor_parallel_size), config.context_parallel_size)
