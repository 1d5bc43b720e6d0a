"""Overlap of the collectives of tensor-parallel layers with their own products."""

from __future__ import annotations

from torch import nn

from lightning_ptdp.shims.torch_distributed import connect_symmetric_memory
from lightning_ptdp.tensor_parallel.linear import ParallelLayer
from lightning_ptdp.tensor_parallel.overlap import Pieces
from lightning_ptdp.world.mesh import Group

__all__ = ["overlap_collectives"]

_SYMMETRIC_BYTES = 2**20
"""Size of a first allocation, which finds unreachable ranks before the first step."""


def overlap_collectives(module: nn.Module, *, pieces: Pieces, group: Group) -> None:
    """Let the parallel layers multiply in pieces, those outside of the blocks included.

    Args:
        module: The module after ``parallelize``.
        pieces: The option ``tensor_overlap``.
        group: The tensor group.
    """
    if pieces == "symmetric":
        connect_symmetric_memory(group.name, _SYMMETRIC_BYTES)
    for layer in module.modules():
        if isinstance(layer, ParallelLayer):
            layer.pieces = pieces
