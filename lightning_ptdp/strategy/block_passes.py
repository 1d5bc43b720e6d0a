"""Passes over the repeated blocks of a rank, applied from the innermost to the outermost.

They run after the blocks have been cut, filled and sharded."""

from __future__ import annotations

import torch

from lightning_ptdp.blocks.compiled_blocks import compile_blocks
from lightning_ptdp.blocks.fp8 import apply_fp8
from lightning_ptdp.blocks.recompute import apply_recomputation, remove_recomputation
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.shims.torch import connect_symmetric_memory
from lightning_ptdp.tensor_parallel.linear import ParallelLayer
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["prepare_blocks"]

_SYMMETRIC_BYTES = 2**20
"""Size of a first allocation, which finds unreachable ranks before the first step."""


def prepare_blocks(
    *,
    config: PTDPConfig,
    mesh: ProcessMesh,
    parallel: ParallelModel,
    surroundings: Surroundings,
    device: torch.device,
) -> tuple[str, ...]:
    """Apply the block passes that the options select, in place.

    The innermost pass computes products in pieces or in float8. The compiled forward is around it.
    Recomputation or offload is the outermost pass.

    Returns:
        Notes for the layout summary.

    Raises:
        ValueError: The device or the machine lacks what an option needs, or a stage has too few
            layers.
    """
    module, notes = parallel.module, list[str]()
    blocks = parallel.cut.parts.blocks if parallel.cut is not None else parallel.plan.blocks
    if config.tensor_overlap == "symmetric":
        connect_symmetric_memory(mesh.group("tensor").name, _SYMMETRIC_BYTES)
    for layer in module.modules():
        if isinstance(layer, ParallelLayer):
            layer.pieces = config.tensor_overlap
    if config.fp8 is not None:
        notes.append(apply_fp8(module, scaling=config.fp8, blocks=blocks, device=device))
    remove_recomputation(module)
    compile_blocks(
        module,
        policy=config.compiles,
        blocks=blocks,
        device=device,
        options=config.compile_options or {},
    )
    apply_recomputation(
        module,
        policy=config.recompute,
        layers=config.recompute_layers,
        blocks=blocks,
        ranges=parallel.ranges,
        selective=parallel.plan.selective,
        shard_input=mesh.group("tensor") if config.distribute_saved_activations else None,
        surroundings=surroundings,
    )
    return tuple(notes)
