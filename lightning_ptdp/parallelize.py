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
        tensor_overlap, fp8, compile, recompute (or offload): ``BLOCK_PASSES``

Each module is filled just before it is sharded, so that no rank holds more than one whole module.
Gradients are made last, by the engine, because ``configure_optimizers`` may still change which
parameters are trained. A parameter that is added after ``parallelize`` is refused by name. The
result is the user's own object. It holds only this rank's part, under the names of the uncut model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from lightning_ptdp.blocks.collective_overlap import overlap_collectives
from lightning_ptdp.blocks.compiled_blocks import CompiledForward, compile_blocks
from lightning_ptdp.blocks.fp8 import Float8Linear, apply_fp8
from lightning_ptdp.blocks.offload import Offloaded
from lightning_ptdp.blocks.recompute import Recomputed, apply_recomputation
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.forward.own_forward import give_back_forwards
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parameters.layout_notes import layout_notes
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.parameters.materialize import Materializer, agree_on_values, make_room
from lightning_ptdp.parameters.placement import Placement, Sum
from lightning_ptdp.parameters.uncut_view import UncutView
from lightning_ptdp.pipeline.balance import layer_ranges
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import ModelParts, PipelineCut, Placeholder
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

__all__ = [
    "BLOCK_PASSES",
    "BlockPass",
    "BlockSetting",
    "KnownParts",
    "ParallelModel",
    "apply_block_passes",
    "parallelize",
]


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
        split_blocks: Dotted name of the container outside of which sequence parallelism leaves the
            sequence whole; None: there is none.
    """

    module: nn.Module
    plan: ParallelPlan
    cut: PipelineCut | None = None
    parameters: ManagedParameters = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    whole: UncutView | None = None
    notes: tuple[str, ...] = ()
    split_blocks: str | None = None

    def check(self, *, frozen: bool = True) -> None:
        """Check that every parameter of the module is managed.

        With ``frozen=False`` only trained parameters are checked.

        Raises:
            ValueError: Some are not; names them.
        """
        held = [
            (name, p) for name, p in self.module.named_parameters() if frozen or p.requires_grad
        ]
        unknown = [name for name, parameter in held if parameter not in self.parameters]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}: made or replaced "
                "after the model was laid out over the "
                "ranks, so nothing would sum or save it. Make parameters in __init__ or "
                "configure_model, before the optimizer"
            )

    @cached_property
    def kept(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that every pipeline stage keeps, by name."""
        everywhere = self.cut.parts.everywhere if self.cut is not None else ()
        return {
            f"{top}.{name}": one
            for top in everywhere
            for name, one in self.module.get_submodule(top).named_parameters()
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

    Raises:
        ValueError: The plan, the partition or the sizes do not fit the model.
    """
    layout = mesh.layout
    tensor, pipeline = mesh.group("tensor"), mesh.group("pipeline")
    convert()
    planned = plan(module)
    degrees = {axis: layout.size(axis) for axis in SPLIT_AXES}
    kinds = planned.divided(module, **degrees)
    planned.check(module, tensor.size, layout.sequence_parallel, converted=True, **degrees)
    if layout.divides_model:
        set_numbers(module, planned.numbers, tensor_parallel_size=tensor.size)
        keep_padded(module)
    built = [
        (name, t)
        for name, t in (*module.named_parameters(), *module.named_buffers())
        if not t.is_meta
    ]
    differing = agree_on_values(built, device=device)
    whole = _Whole.of(module)
    view = UncutView(module, whole.names) if layout.divides_model else None
    materialize = Materializer(module, seed=seed, device=device, left=left)

    cut: PipelineCut | None = None
    if pipeline.size > 1:
        parts = KnownParts.of(module, planned, known).parts
        ranges = layer_ranges(module, parts=parts, layout=layout, partition=partition)
        stages = layout.stages_of(pipeline.rank)
        cut = PipelineCut(
            module, parts=parts, ranges=ranges, stages=stages, collects=planned.collects
        )

    placements = _build_local(module, planned, kinds, materialize, whole, mesh)
    if tensor.size > 1:
        refuse_captured_parts(module, sequence_parallel=layout.sequence_parallel)
    make_room(
        module,
        device=device,
        padded={parameter for parameter, one in placements.items() if one.num_padding},
    )
    copies = {c for kind in kinds.values() for c in kind.copies(mesh.group(kind.axis).size)}
    copy_groups = {c: _copies(mesh, c) for c in sorted(copies - {1})}
    parameters = _managed(module, placements, whole, cut, mesh, copy_groups)
    notes = layout_notes(
        differing=differing,
        everywhere=cut.parts.everywhere if cut is not None else (),
        placements={managed.name: managed.placement for managed in parameters.values()},
        padded={
            name
            for name, users in whole.users.items()
            if any(user in kinds and kinds[user].pads for user in users)
        },
        size=tensor.size,
    )
    parallel = ParallelModel(
        module=module,
        plan=planned,
        cut=cut,
        parameters=parameters,
        aliases=whole.aliases,
        names=tuple(whole.order),
        whole=view,
        notes=tuple(notes),
        split_blocks=planned.split_blocks
        if layout.sequence_parallel and planned.sequence == "blocks"
        else None,
    )
    parallel.check()
    return parallel


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
    overlap_collectives(
        to.parallel.module, pieces=to.config.tensor_overlap, group=to.mesh.group("tensor")
    )


def _float8(to: BlockSetting) -> str:
    scaling, blocks = to.config.fp8, to.parallel.blocks
    assert scaling is not None
    return apply_fp8(to.parallel.module, scaling=scaling, blocks=blocks, device=to.device)


def _compile(to: BlockSetting) -> None:
    compile_blocks(
        to.parallel.module,
        policy=to.config.compiles,
        blocks=to.parallel.blocks,
        device=to.device,
        options=to.config.compile_options or {},
    )


def _recompute(to: BlockSetting) -> None:
    config, parallel = to.config, to.parallel
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
    # Around the compiled forward, so that a recomputed forward is compiled, too; or offload, which
    # keeps what the compiled forward saves.
    BlockPass("recompute", lambda config: config.recompute != "none", _recompute),
)
"""All block passes, the innermost first.

They follow ``parallelize``, because they need the local blocks with their values: kinds have
replaced the split modules and the parts of adapters by then. To add a pass, add an entry.
"""


def apply_block_passes(to: BlockSetting) -> ParallelModel:
    """Apply the block passes that the options select, in place, after undoing an earlier call.

    Returns:
        The model with the passes' notes for the layout summary.

    Raises:
        ValueError: The device or the machine lacks what an option needs, or a stage has too few
            layers.
    """
    give_back_forwards(to.parallel.module, Float8Linear, CompiledForward, Recomputed, Offloaded)
    notes = [each.apply(to) for each in BLOCK_PASSES if each.applies(to.config)]
    return replace(
        to.parallel, notes=(*to.parallel.notes, *(note for note in notes if note is not None))
    )


@dataclass(frozen=True)
class KnownParts:
    """Places of a whole model's modules.

    They are kept, because finding them takes several runs without data.

    Attributes:
        parts: The places.
        found_for: Names and classes of the modules, and the plan's fields about places.
    """

    parts: ModelParts
    found_for: tuple[object, ...]

    @classmethod
    def of(
        cls, module: nn.Module, plan: ParallelPlan, known: KnownParts | None = None
    ) -> KnownParts:
        """Return the places by the plan and the model, or ``known`` if it still applies.

        Hooks may have changed the model since ``known`` was found.

        Raises:
            ValueError: See ``find_parts``.
        """
        said = {
            name: getattr(plan, name)
            for name in ("blocks", "before", "between", "after", "everywhere")
        }
        modules = (
            f"{name}: {type(child).__qualname__}"
            for name, child in module.named_modules(remove_duplicate=False)
        )
        found_for = (*said.values(), *modules)
        return (
            known
            if known is not None and known.found_for == found_for
            else cls(find_parts(module, **said), found_for)
        )


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """Names, positions and users of the uncut model's parameters.

    Attributes:
        names: First name under which each parameter, or its later replacement, is registered.
        order: Position of each parameter, by name.
        users: Names of the modules that hold each parameter, tied ones included.
        aliases: Further names -> the first name.
    """

    names: dict[nn.Parameter, str]
    order: Mapping[str, int]
    users: Mapping[str, Sequence[str]]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> _Whole:
        names = {parameter: name for name, parameter in module.named_parameters()}
        order = {name: index for index, name in enumerate(names.values())}
        users: dict[str, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            for parameter in child._parameters.values():
                if parameter is not None:
                    users.setdefault(names[parameter], []).append(name)
        tied = module.named_parameters(remove_duplicate=False)
        return cls(
            names=names,
            order=order,
            users=users,
            aliases={n: names[p] for n, p in tied if n not in order},
        )


def _build_local(
    module: nn.Module,
    plan: ParallelPlan,
    kinds: Mapping[str, Kind],
    materialize: Materializer,
    whole: _Whole,
    mesh: ProcessMesh,
) -> dict[nn.Parameter, Placement]:
    """Give values to the local modules and shard them, one module at a time.

    Keeps ``whole.names`` up to date."""
    tensor, sequence_parallel = (
        mesh.group("tensor"),
        mesh.layout.sequence_parallel and mesh.group("tensor").size > 1,
    )
    shared: dict[int, nn.Parameter] = {}
    placements: dict[nn.Parameter, Placement] = {}
    places, names = _places(module), whole.names
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
        new, own = shard_module(
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
        for key, placement in own.items():
            parameter = new.get_parameter(key)
            names[parameter], placements[parameter] = names[old[key]], placement
            if parameter is not old[key] and len(whole.users[names[parameter]]) == 1:
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


def _managed(
    module: nn.Module,
    placements: Mapping[nn.Parameter, Placement],
    whole: _Whole,
    cut: PipelineCut | None,
    mesh: ProcessMesh,
    copy_groups: Mapping[int, Group],
) -> ManagedParameters:
    """Return the local parameters, with placements that know the other ranks.

    The groups of shared parameters are made here, in the same order on all ranks of a pipeline."""
    layout, place = mesh.layout, mesh.group("pipeline").rank
    stages_of: dict[str, set[int]] = {}
    for name, holders in whole.users.items():
        found = (
            [cut.module_stages[holder] or range(layout.num_stages) for holder in holders]
            if cut is not None
            else [(0,)]
        )
        stages_of[name] = {stage for stages in found for stage in stages}
    ranks_of = {
        name: tuple(sorted({layout.rank_of_stage(stage) for stage in stages}))
        for name, stages in stages_of.items()
    }
    groups = {
        ranks: _holders(mesh, ranks) for ranks in sorted(set(ranks_of.values())) if len(ranks) > 1
    }
    managed = {}
    for parameter in module.parameters():
        name = whole.names[parameter]
        ranks = ranks_of[name]
        stages = [stage for stage in stages_of[name] if layout.rank_of_stage(stage) == place]
        managed[parameter] = ManagedParameter(
            parameter=parameter,
            placement=_with_others(
                placements[parameter], mesh, copy_groups, ranks[0], groups.get(ranks)
            ),
            name=name,
            order=whole.order[name],
            stages=tuple(sorted(stages)),
        )
    return managed


def _with_others(
    placement: Placement,
    mesh: ProcessMesh,
    copy_groups: Mapping[int, Group],
    first: int,
    holders: Group | None,
) -> Placement:
    """Return the placement with the facts about other ranks.

    ``first`` is the first pipeline rank that holds the parameter; ``holders`` is the group of those
    that do, if there are several."""
    data_axes = mesh.layout.summed(placement.sharded)
    partial = [mesh.group(axis) for axis in placement.partial]
    sums: list[Sum] = [(None, group) for group in partial if group.size > 1]
    sums += [
        (piece.in_local, copy_groups[piece.copies])
        for piece in placement.pieces
        if piece.copies > 1
    ]
    sums += [(None, holders)] if holders is not None else []
    # axes on which an earlier rank holds it alike
    repeated = [
        axis
        for axis in mesh.layout.axes
        if axis.name not in placement.sharded
        and mesh.group(axis.name).rank != (first if axis.name == "pipeline" else 0)
    ]
    return replace(
        placement,
        sharded=(*placement.sharded, "pipeline"),
        partial=(*placement.partial, *data_axes, *(["pipeline"] if holders is not None else [])),
        data_axes=data_axes,
        sums=tuple(sums),
        first_in_replica=all(axis.reads != "same" for axis in repeated),
        first_in_block=all(axis.within is None for axis in repeated),
    )


def _holders(mesh: ProcessMesh, places: tuple[int, ...]) -> Group:
    """Return the group of the pipeline ranks at ``places``.

    A rank outside of ``places`` gets a group of the remaining ranks, which is not used."""
    pipeline = mesh.group("pipeline")
    others = tuple(place for place in range(pipeline.size) if place not in places)
    return mesh.subgroup("pipeline", places if pipeline.rank in places else others)


def _copies(mesh: ProcessMesh, copies: int) -> Group:
    """Return the group of ``copies`` neighbouring tensor ranks that hold the same heads.

    This rank is one of them."""
    start = mesh.group("tensor").rank // copies * copies
    return mesh.subgroup("tensor", tuple(range(start, start + copies)))
