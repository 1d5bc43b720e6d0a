"""Conversion of an ordinary module to this rank's part of it.

The complete order::

    parallelize
        convert           precision plugins replace modules and parameters
        numbers           plain attributes that count heads or features get this rank's value
        cut               blocks and ends of other stages become placeholders and stubs
        fill and shard    module by module: initial values, then the kind's replacement, which
                          includes the parts of adapters (tensor, expert, context parallelism)
        records           place of each parameter in the whole model
    apply_block_passes
        tensor_overlap, fp8, compile, recompute (or offload): ``strategy/block_passes.py``

Each module is filled just before it is sharded, so that no rank holds more than one whole module.
Gradients are made last, by the engine, because ``configure_optimizers`` may still change which
parameters are trained. A parameter that is added after ``parallelize`` is refused by name. The
result is the user's own object. It holds only this rank's part, under the names of the uncut model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from lightning_ptdp.base.errors import listed
from lightning_ptdp.data_parallel.flat_parameters import LateValue
from lightning_ptdp.data_parallel.sharded_parameters import Direction, ShardedParameters
from lightning_ptdp.forward.matrix_product import StepCasts
from lightning_ptdp.parameters.managed_parameter import (
    ManagedParameter,
    ManagedParameters,
    WholeParameters,
    layout_notes,
    manage_parameters,
)
from lightning_ptdp.parameters.materialize import Materializer, agree_on_values, make_room
from lightning_ptdp.parameters.placement import Placement, slice_full
from lightning_ptdp.parameters.uncut_view import UncutView
from lightning_ptdp.pipeline.containers import Blocks, layer_ranges
from lightning_ptdp.pipeline.discover import KnownParts
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.shims.quantization import keep_format, parts_of, quantized_parameters
from lightning_ptdp.shims.torch import keep_padded
from lightning_ptdp.tensor_parallel import (
    SPLIT_AXES,
    Kind,
    ParallelPlan,
    is_in_region,
    refuse_captured_parts,
    replace_aliases,
    set_numbers,
    shard_module,
    split_sequence,
)
from lightning_ptdp.world.mesh import Group, ProcessMesh


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """Result of ``parallelize``.

    Attributes:
        module: The module, changed in place.
        plan: Plan of its submodules.
        cut: This rank's stages (None without a pipeline).
        parameters: All local parameters.
        aliases: Further names of tied parameters -> the first name, in the uncut model.
        names: Names of all parameters of the uncut model, tied ones once.
        whole: The uncut module's structure; None if every rank has all of it.
        notes: Notes for the user.
        late_value: Returns the initial value of a parameter that is still on the meta device, on
            the CPU; None: it comes from elsewhere.
        shards: This rank's part of sharded parameters; None: they are not sharded.
        split_blocks: Dotted name of the container outside of which sequence parallelism leaves the
            sequence whole; None: there is none.
        casts: Cast copies of parameters that the products of this package share.
    """

    module: nn.Module
    plan: ParallelPlan
    cut: PipelineCut | None = None
    parameters: ManagedParameters = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    whole: UncutView | None = None
    notes: tuple[str, ...] = ()
    late_value: LateValue | None = None
    shards: ShardedParameters | None = None
    split_blocks: str | None = None
    casts: StepCasts = field(default_factory=StepCasts)

    def computing(self, *, forward: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass, in which sharded parameters are gathered when read.

        With ``forward`` they are read in the order of a forward.
        """
        direction: Direction = 1 if forward else -1
        return contextlib.nullcontext() if self.shards is None else self.shards.computing(direction)

    def check(self, *, frozen: bool = True) -> None:
        """Check that every parameter of the module is managed.

        With ``frozen=False`` only trained parameters are checked.

        Raises:
            ValueError: Some are not; names them.
        """
        parameters = [
            (name, p) for name, p in self.module.named_parameters() if frozen or p.requires_grad
        ]
        unknown = [name for name, parameter in parameters if parameter not in self.parameters]
        if unknown:
            raise ValueError(
                f"{listed(unknown, 3)}: created or "
                "replaced after the model was distributed over the ranks. It would be neither "
                "reduced nor saved. Create parameters in __init__ or configure_model, before "
                "the optimizer"
            )

    @cached_property
    def kept(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that every pipeline stage keeps, by name."""
        everywhere = self.cut.parts.everywhere if self.cut is not None else ()
        return {
            f"{top}.{name}": parameter
            for top in everywhere
            for name, parameter in self.module.get_submodule(top).named_parameters()
        }

    @property
    def blocks(self) -> Blocks | None:
        """Return the dotted names of the repeated containers; None: unknown."""
        return self.cut.parts.blocks if self.cut is not None else self.plan.blocks

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open layer ranges, one per stage; none without a pipeline."""
        return self.cut.ranges if self.cut is not None else ()


def parallelize(  # noqa: PLR0913
    module: nn.Module,
    *,
    convert: Callable[[], object],
    plan: Callable[[nn.Module], ParallelPlan],
    mesh: ProcessMesh,
    partition: Sequence[int] | Sequence[str] | None = None,
    seed: int,
    device: torch.device,
    left: Collection[str] = (),
    known: KnownParts | None = None,
    late: bool = False,
) -> ParallelModel:
    """Make ``module`` this rank's part of itself, in place; collective over the world.

    Args:
        module: The whole module, on the meta device or with values.
        convert: Replaces modules and parameters of it, if an option requires that.
        plan: Returns the plan of the converted module.
        mesh: This rank's coordinates and groups.
        partition: Layers per stage, or the name of each stage's first layer, for a chosen uneven
            cut.
        seed: Seed of the initial values of meta modules.
        device: Device of the parameters.
        left: Names of meta parameters without drawn initial values, because their values are loaded
            later.
        known: Places of the modules, if the check before launch has found them.
        late: Leave meta parameters on the meta device, for ``late_value``.

    Raises:
        ValueError: The plan, the partition or the sizes do not fit the model, or quantized weights
            differ between the ranks.
    """
    layout = mesh.layout
    tensor = mesh.group("tensor")
    pipeline = mesh.group("pipeline")
    convert()
    planned = plan(module)
    degrees = {axis: layout.size(axis) for axis in SPLIT_AXES}
    kinds = planned.divided(module, **degrees)
    planned.check(module, tensor.size, layout.sequence_parallel, converted=True, **degrees)
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
    full_parameters = WholeParameters.of(module)
    view = UncutView(module, full_parameters.names) if layout.divides_model else None
    materialize = Materializer(module, seed=seed, device=device, left=left, late=late)

    cut: PipelineCut | None = None
    if pipeline.size > 1:
        parts = KnownParts.of(module, planned, known).parts
        ranges = layer_ranges(module, parts=parts, layout=layout, partition=partition)
        stages = layout.stages_of(pipeline.rank)
        cut = PipelineCut(
            module, parts=parts, ranges=ranges, stages=stages, collects=planned.collects
        )

    placements = _build_local(module, planned, kinds, materialize, full_parameters, mesh)
    if tensor.size > 1:
        refuse_captured_parts(module, kinds, sequence_parallel=layout.sequence_parallel)
    padded = {parameter for parameter, placement in placements.items() if placement.num_padding}
    if not late:
        make_room(module, device=device, padded=padded)
    copies = {c for kind in kinds.values() for c in kind.copies(mesh.group(kind.axis).size)}
    copy_groups = {c: _copies(mesh, c) for c in sorted(copies - {1})}
    parameters = manage_parameters(
        module,
        placements,
        full_parameters,
        cut.module_stages if cut is not None else None,
        mesh,
        copy_groups,
    )
    notes = layout_notes(
        differing=differing,
        everywhere=cut.parts.everywhere if cut is not None else (),
        placements={managed.name: managed.placement for managed in parameters.values()},
        padded={
            name
            for name, users in full_parameters.users.items()
            if any(user in kinds and kinds[user].pads for user in users)
        },
        size=tensor.size,
    )
    parallel = ParallelModel(
        module=module,
        plan=planned,
        cut=cut,
        parameters=parameters,
        aliases=full_parameters.aliases,
        names=tuple(full_parameters.order),
        whole=view,
        notes=tuple(notes),
        split_blocks=planned.split_blocks
        if layout.sequence_parallel and planned.sequence == "blocks"
        else None,
        late_value=partial(_local_value, materialize) if late else None,
    )
    for child in module.modules():
        if "step_casts" in vars(child):
            child.step_casts = parallel.casts  # type: ignore[assignment]
    parallel.check()
    return parallel


def _local_value(materialize: Materializer, managed: ManagedParameter) -> Tensor | None:
    value = materialize.value(managed.name)
    return None if value is None else slice_full(value, managed.placement)


def _build_local(
    module: nn.Module,
    plan: ParallelPlan,
    kinds: Mapping[str, Kind],
    materialize: Materializer,
    full_parameters: WholeParameters,
    mesh: ProcessMesh,
) -> dict[nn.Parameter, Placement]:
    """Give values to the local modules and shard them, one module at a time.

    Keeps ``full_parameters.names`` up to date."""
    tensor = mesh.group("tensor")
    sequence_parallel = mesh.layout.sequence_parallel and mesh.group("tensor").size > 1
    shared: dict[int, nn.Parameter] = {}
    placements: dict[nn.Parameter, Placement] = {}
    places = _places(module)
    names = full_parameters.names
    for name, child in list(module.named_modules()):
        kind = None if isinstance(child, Placeholder) else kinds.get(name)
        # A kind may apply to a module with children, which then need their values first.
        for suffix, part in (
            [("", child)] if kind is None or kind.keeps_children else child.named_modules()
        ):
            before = dict(part._parameters)
            materialize(part, f"{name}.{suffix}" if suffix else name)
            names.update(
                {
                    p: names[old]
                    for p, old in zip(part._parameters.values(), before.values(), strict=True)
                    if p is not None
                }
            )
        if kind is None:
            continue
        old = dict(child.named_parameters())
        splits = plan.splits_sequence(name, sequence_parallel)
        new, local_placements = shard_module(
            child,
            kind,
            group=mesh.group(kind.axis),
            sequence_parallel=splits,
            shared=shared,
            enters=not is_in_region(name, kinds),
            tensor=tensor,
            name=name,
        )
        for parent, key in places[child] if new is not child else ():
            parent._modules[key] = new
        for key, placement in local_placements.items():
            parameter = new.get_parameter(key)
            names[parameter], placements[parameter] = names[old[key]], placement
            if parameter is not old[key] and len(full_parameters.users[names[parameter]]) == 1:
                # The slice is a copy. Release the full value.
                old[key].data = old[key].data.new_empty(0)
    replace_aliases(module, shared)
    for name, parameter in module.named_parameters():
        if parameter not in placements:
            placements[parameter] = Placement.replicated(
                parameter.shape, partial=plan.partial(name, sequence_parallel)
            )
    if sequence_parallel:
        split_sequence(module, plan, group=tensor)
    return placements


def _places(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the parents and names under which each module is registered.

    A module may have several names."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    return places


def _copies(mesh: ProcessMesh, copies: int) -> Group:
    """Return the group of ``copies`` neighbouring tensor ranks that hold the same heads.

    This rank is one of them."""
    start = mesh.group("tensor").rank // copies * copies
    return mesh.subgroup("tensor", tuple(range(start, start + copies)))
