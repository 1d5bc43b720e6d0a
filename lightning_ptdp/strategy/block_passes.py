"""The ordered list of passes over this rank's blocks.

They follow ``parallelize``, because they need the local blocks with their values: kinds have
replaced the split modules and the parts of adapters by then. To add a pass, add an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_ptdp.blocks.compiled_blocks import CompiledForward, compile_blocks
from lightning_ptdp.blocks.fp8 import Float8Linear, apply_fp8
from lightning_ptdp.blocks.offload import Offloaded
from lightning_ptdp.blocks.recompute import Recomputed, apply_recomputation
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.gradient_store import make_reductions
from lightning_ptdp.data_parallel.sharded_parameters import GatheredForward, ShardedParameters
from lightning_ptdp.forward.own_forward import give_back_forwards
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.parameters.materialize import put_values
from lightning_ptdp.shims.torch_distributed import connect_symmetric_memory
from lightning_ptdp.tensor_parallel.linear import ParallelLayer
from lightning_ptdp.world.mesh import ProcessMesh

_SYMMETRIC_BYTES = 2**20
"""Size of a first allocation, which finds unreachable ranks before the first step."""


@dataclass(frozen=True, kw_only=True)
class BlockSetting:
    """Arguments of a block pass.

    Attributes:
        config: Options of the run.
        mesh: This rank's coordinates and groups.
        parallel: Result of ``parallelize``.
        surroundings: Contexts around the forwards of this rank.
        device: Device of the parameters.
    """

    config: PTDPConfig
    mesh: ProcessMesh
    parallel: ParallelModel
    surroundings: Surroundings
    device: torch.device


@dataclass(frozen=True)
class BlockPass:
    """One change of this rank's blocks.

    Attributes:
        option: Option that selects it.
        applies: Returns True if the option does.
        apply: Changes the blocks in place, and may return a note for the layout summary.
    """

    option: str
    applies: Callable[[PTDPConfig], bool]
    apply: Callable[[BlockSetting], str | None]


def _overlap(to: BlockSetting) -> None:
    """Let the parallel layers multiply in pieces, those outside of the blocks included."""
    pieces = to.config.tensor_overlap
    if pieces == "symmetric":
        connect_symmetric_memory(to.mesh.group("tensor").name, _SYMMETRIC_BYTES)
    for layer in to.parallel.module.modules():
        if isinstance(layer, ParallelLayer):
            layer.pieces = pieces


def _float8(to: BlockSetting) -> str:
    scaling = to.config.fp8
    shards = to.parallel.shards
    assert scaling is not None
    return apply_fp8(
        to.parallel.module,
        scaling=scaling,
        blocks=to.parallel.blocks,
        device=to.device,
        gather=None if shards is None else shards.gather_rounded,
    )


def _compile(to: BlockSetting) -> None:
    compile_blocks(
        to.parallel.module,
        policy=to.config.compiles,
        blocks=to.parallel.blocks,
        device=to.device,
        options=to.config.compile_options or {},
    )


def _shard(to: BlockSetting) -> None:
    if to.parallel.shards is not None:
        to.parallel.shards.put_on_blocks()


def _recompute(to: BlockSetting) -> None:
    config = to.config
    parallel = to.parallel
    apply_recomputation(
        parallel.module,
        policy=config.recompute,
        layers=config.recompute_layers,
        blocks=parallel.blocks,
        ranges=parallel.ranges,
        selective=parallel.plan.selective,
        shard_input=to.mesh.group("tensor") if config.distribute_saved_activations else None,
        surroundings=to.surroundings,
    )


BLOCK_PASSES = (
    # Products in pieces that overlap with collectives: an option of the layers that kinds have made.
    BlockPass("tensor_overlap", lambda config: config.tensor_overlap != 1, _overlap),
    # Products in float8: likewise, and before compilation, whose graphs contain the products.
    BlockPass("fp8", lambda config: config.fp8 is not None, _float8),
    # The forward of a block. Its hooks and its recomputation stay outside of the graph.
    BlockPass("compile", lambda config: config.compiles != "none", _compile),
    # Gathers a block's parameters before its compiled forward, and again when it is recomputed.
    BlockPass("shard", lambda config: config.shard == "parameters", _shard),
    # Around the compiled forward, so that a recomputed forward is compiled, too; or offload, which
    # keeps what the compiled forward saves.
    BlockPass("recompute", lambda config: config.recompute != "none", _recompute),
)
"""All block passes, the innermost first."""


def shard_parameters(
    parallel: ParallelModel, *, config: PTDPConfig, mesh: ProcessMesh, device: torch.device
) -> ParallelModel:
    """Leave each replica its part of the parameters, before the passes.

    Parameters on the meta device get their values, those of one block at a time.
    """
    reductions = make_reductions(config, mesh)
    gathers = {
        axes: replace(reduction, inner=mesh.apart(reduction.inner))
        for axes, reduction in reductions.items()
    }
    shards = ShardedParameters(
        parallel.module,
        parallel.parameters,
        blocks=parallel.blocks,
        reductions=gathers,
        device=device,
        late_value=parallel.late_value,
        by_block=config.reshards_after == "block",
    )
    for managed in parallel.parameters.values():
        if managed.parameter.is_meta and parallel.late_value is not None:  # not sharded
            values = parallel.late_value(managed)
            empty = torch.zeros_like(managed.parameter, device=device)
            put_values(managed.parameter, empty if values is None else values.to(device))
    return replace(parallel, shards=shards)


def apply_block_passes(to: BlockSetting) -> ParallelModel:
    """Apply the block passes that the options select, in place, after undoing an earlier call.

    Returns:
        The model with the passes' notes for the layout summary.

    Raises:
        ValueError: The device or the machine lacks what an option needs, or a stage has too few
            layers.
    """
    give_back_forwards(
        to.parallel.module, Float8Linear, CompiledForward, GatheredForward, Recomputed, Offloaded
    )
    notes = [block_pass.apply(to) for block_pass in BLOCK_PASSES if block_pass.applies(to.config)]
    return replace(
        to.parallel, notes=(*to.parallel.notes, *(note for note in notes if note is not None))
    )
