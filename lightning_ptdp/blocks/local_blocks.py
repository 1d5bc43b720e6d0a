"""The repeated blocks that this rank holds, and the overlap of their collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from lightning_ptdp.pipeline.containers import Blocks, layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.shims.torch_distributed import connect_symmetric_memory
from lightning_ptdp.tensor_parallel.linear import ParallelLayer
from lightning_ptdp.tensor_parallel.parallel_product import Pieces
from lightning_ptdp.world.mesh import Group


class LocalBlock(NamedTuple):
    """A block of this rank.

    Attributes:
        number: Its number in the sequence of all layers.
        name: Its dotted name.
        module: The block.
    """

    number: int
    name: str
    module: nn.Module


def local_blocks(module: nn.Module, blocks: Blocks | None) -> Iterator[LocalBlock]:
    """Yield the blocks of ``module`` that are not on other stages.

    ``blocks`` names the repeated containers; None: they are found.

    Raises:
        ValueError: No container is found.
    """
    layers = layers_of(module, find_blocks(module) if blocks is None else blocks)
    for number, layer in enumerate(layers):
        block = module.get_submodule(layer.name)
        if not isinstance(block, Placeholder):
            yield LocalBlock(number, layer.name, block)


# ---- Overlap of the collectives of tensor-parallel layers with their own products ----------------


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
