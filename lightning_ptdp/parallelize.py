"""Conversion of an ordinary module to this rank's part of it.

The complete order::

    parallelize
        convert           precision plugins replace modules and parameters
        numbers           plain attributes that count heads or features get this rank's value
        cut               blocks and ends of other stages become placeholders and stubs
        fill and divide   module by module: initial values, then the kind's replacement, which
                          includes the parts of adapters (tensor, expert, context parallelism)
        records           place of each parameter in the whole model
        shard             each replica keeps its part of the parameters (``shard="parameters"``)
    apply_block_passes
        tensor_overlap, fp8, compile, shard, recompute (or offload)

Each module is filled just before it is divided, so that no rank holds more than one whole module.
Gradients are made last, by the engine, because ``configure_optimizers`` may still change which
parameters are trained. A parameter that is added after ``parallelize`` is refused by name. The
result is the user's own object. It holds only this rank's part, under the names of the uncut model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_ptdp.blocks.fp8 import Float8Linear, apply_fp8
from lightning_ptdp.blocks.local_blocks import (
    CompiledForward,
    compile_blocks,
    overlap_collectives,
)
from lightning_ptdp.blocks.offload import Offloaded
from lightning_ptdp.blocks.recompute import Recomputed, apply_recomputation
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.gradient_store import make_reductions
from lightning_ptdp.data_parallel.sharded_parameters import GatheredForward, ShardedParameters
from lightning_ptdp.forward.own_forward import restore_forwards
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parallel_model import ParallelModel, build_local, checked_kinds
from lightning_ptdp.parameters.managed_parameter import (
    ManagedParameter,
    UncutParameters,
    layout_notes,
    manage_parameters,
)
from lightning_ptdp.parameters.materialize import (
    Materializer,
    agree_on_values,
    make_room,
    put_values,
)
from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.parameters.structure_copies import UncutView
from lightning_ptdp.pipeline.containers import layer_ranges
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.shims.quantization import keep_format, parts_of, quantized_parameters
from lightning_ptdp.shims.torch import keep_padded
from lightning_ptdp.tensor_parallel import (
    ParallelPlan,
    refuse_captured_parts,
    set_numbers,
)
from lightning_ptdp.world.mesh import Group, ProcessMesh


def parallelize(  # noqa: PLR0913
    module: nn.Module,
    *,
    convert: Callable[[], object],
    plan: Callable[[nn.Module], ParallelPlan],
    mesh: ProcessMesh,
    config: PTDPConfig,
    seed: int,
    device: torch.device,
    left: Collection[str] = (),
    known: KnownParts | None = None,
) -> ParallelModel:
    """Make ``module`` this rank's part of itself, in place; collective over the world.

    Args:
        module: The whole module, on the meta device or with values.
        convert: Replaces modules and parameters of it, if an option requires that.
        plan: Returns the plan of the converted module.
        mesh: This rank's coordinates and groups.
        config: Options of the run.
        seed: Seed of the initial values of meta modules.
        device: Device of the parameters.
        left: Names of meta parameters without drawn initial values, because their values are loaded
            later.
        known: Places of the modules, if the check before launch has found them.

    Raises:
        ValueError: The plan, the partition or the sizes do not fit the model, or quantized weights
            differ between the ranks.
    """
    layout = mesh.layout
    tensor = mesh.group("tensor")
    pipeline = mesh.group("pipeline")
    convert()
    planned = plan(module)
    kinds = checked_kinds(module, planned, layout, converted=True)
    if layout.divides_model:
        set_numbers(module, planned.numbers, tensor_parallel_size=tensor.size)
        keep_padded(module)
    keep_format(module)
    built = [
        (name, part)
        for name, t in (*module.named_parameters(), *module.named_buffers())
        if not t.is_meta
        for part in parts_of(t)
    ]
    differing = agree_on_values(built, device=device)
    for name in sorted(quantized_parameters(module).keys() & differing):
        raise ValueError(
            f"'{name}' is quantized and differs between the ranks, which cannot copy it from each "
            "other. Load the same weights on every rank"
        )
    uncut = UncutParameters.of(module)
    view = UncutView(module, uncut.names) if layout.divides_model else None
    # With sharded parameters, values are drawn when a replica's part of them is known.
    late = config.sharded_state(layout) == "parameters"
    materialize = Materializer(module, seed=seed, device=device, left=left, late=late)

    cut: PipelineCut | None = None
    if pipeline.size > 1:
        parts = KnownParts.of(module, planned, known).parts
        cut = PipelineCut(
            module,
            parts=parts,
            ranges=layer_ranges(module, parts=parts, layout=layout, partition=config.partition),
            stages=layout.stages_of(pipeline.rank),
            collects=planned.collects,
        )

    placements = build_local(module, planned, kinds, materialize, uncut, mesh)
    if tensor.size > 1:
        refuse_captured_parts(module, kinds, sequence_parallel=layout.sequence_parallel)
    if not late:
        padded = {parameter for parameter, placement in placements.items() if placement.num_padding}
        make_room(module, device=device, padded=padded)
    copies = {c for kind in kinds.values() for c in kind.copies(mesh.group(kind.axis).size)}
    parameters = manage_parameters(
        module,
        placements,
        uncut,
        cut.module_stages if cut is not None else None,
        mesh,
        {c: _copies(mesh, c) for c in sorted(copies - {1})},
    )
    notes = layout_notes(
        differing=differing,
        everywhere=cut.parts.everywhere if cut is not None else (),
        placements={managed.name: managed.placement for managed in parameters.values()},
        padded={
            name
            for name, users in uncut.users.items()
            if any(user in kinds and kinds[user].pads for user in users)
        },
        size=tensor.size,
    )
    splits_blocks = layout.sequence_parallel and planned.sequence == "blocks"
    parallel = ParallelModel(
        module=module,
        plan=planned,
        cut=cut,
        parameters=parameters,
        aliases=uncut.aliases,
        names=tuple(uncut.order),
        uncut=view,
        notes=tuple(notes),
        split_blocks=planned.split_blocks if splits_blocks else None,
    )
    for child in module.modules():
        if "step_casts" in vars(child):
            child.step_casts = parallel.casts  # type: ignore[assignment]
    parallel.check()
    return _sharded(parallel, materialize, config, mesh, device) if late else parallel


def _copies(mesh: ProcessMesh, copies: int) -> Group:
    """Return the group of ``copies`` neighbouring tensor ranks that hold the same heads.

    This rank is one of them.
    """
    start = mesh.group("tensor").rank // copies * copies
    return mesh.subgroup("tensor", tuple(range(start, start + copies)))


def _sharded(
    parallel: ParallelModel,
    materialize: Materializer,
    config: PTDPConfig,
    mesh: ProcessMesh,
    device: torch.device,
) -> ParallelModel:
    """Leave each replica its part of the parameters.

    Parameters on the meta device get their values, those of one block at a time.
    """

    def initial_value(managed: ManagedParameter) -> Tensor | None:
        value = materialize.value(managed.name)
        return None if value is None else slice_full(value, managed.placement)

    shards = ShardedParameters(
        parallel.module,
        parallel.parameters,
        blocks=parallel.blocks,
        reductions={
            axes: replace(reduction, inner=mesh.apart(reduction.inner))
            for axes, reduction in make_reductions(config, mesh).items()
        },
        device=device,
        late_value=initial_value,
        by_block=config.reshards_after == "block",
    )
    for managed in parallel.parameters.values():
        if managed.parameter.is_meta:  # not sharded
            values = initial_value(managed)
            empty = torch.zeros_like(managed.parameter, device=device)
            put_values(managed.parameter, empty if values is None else values.to(device))
    return replace(parallel, shards=shards)


def apply_block_passes(
    parallel: ParallelModel,
    *,
    config: PTDPConfig,
    mesh: ProcessMesh,
    surroundings: Surroundings,
    device: torch.device,
) -> ParallelModel:
    """Apply the passes over this rank's blocks, in place, after undoing an earlier call.

    The innermost comes first. They follow ``parallelize``, because they need the local blocks with
    their values: kinds have replaced the divided modules and the parts of adapters by then.

    Returns:
        The model with the passes' notes for the layout summary.

    Raises:
        ValueError: The device or the machine lacks what an option needs, or a stage has too few
            layers.
    """
    module = parallel.module
    blocks = parallel.blocks
    shards = parallel.shards
    notes = parallel.notes
    restore_forwards(module, Float8Linear, CompiledForward, GatheredForward, Recomputed, Offloaded)
    # Products in pieces that overlap with collectives: an option of the layers that kinds have
    # made.
    if config.tensor_overlap != 1:
        overlap_collectives(module, pieces=config.tensor_overlap, group=mesh.group("tensor"))
    # Products in float8: likewise, and before compilation, whose graphs contain the products.
    if config.fp8 is not None:
        gather = None if shards is None else shards.gather_rounded
        note = apply_fp8(module, scaling=config.fp8, blocks=blocks, device=device, gather=gather)
        notes = (*notes, note)
    # The forward of a block. Its hooks and its recomputation stay outside of the graph.
    if config.compiles != "none":
        compile_blocks(
            module,
            policy=config.compiles,
            blocks=blocks,
            device=device,
            options=config.compile_options or {},
        )
    # Gathers a block's parameters before its compiled forward, and again when it is recomputed.
    if shards is not None:
        shards.put_on_blocks()
    # Around the compiled forward, so that a recomputed forward is compiled, too; or offload, which
    # keeps what the compiled forward saves.
    if config.recompute != "none":
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
    return replace(parallel, notes=notes)
