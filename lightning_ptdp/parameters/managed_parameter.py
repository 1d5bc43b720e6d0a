"""A local parameter: its place in the model, and the tensor on which the optimizer steps.

Gradients, norms, checkpoints and summaries read nothing else about a parameter.
``manage_parameters`` makes those that this rank holds of the uncut model's parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from lightning_ptdp.base.errors import listed
from lightning_ptdp.parameters.placement import Placement, Sum
from lightning_ptdp.world.mesh import Group, ProcessMesh


@dataclass(eq=False, kw_only=True)
class ManagedParameter:
    """One local parameter.

    Attributes:
        parameter: The module's parameter.
        placement: Its place in the full tensor, and its copies on other ranks.
        name: Global name, the first under which the uncut model registers it.
        order: Position among the uncut model's parameters.
        stages: Local pipeline stages that use it.
        held: Values that this rank keeps between the steps: the parameter's, or a flat part.
        held_placement: Place of ``held`` in the full tensor.
        is_undivided: The optimizer must step on all of the local tensor, not on a range of it.
        stepped: Tensor on which the optimizer steps: the parameter, its main copy (in float32, or
            on the host), or a flat part of either; None if other ranks step on all of it.
        stepped_placement: Place of ``stepped`` in the full tensor.
        rounded: The part of the parameter that receives ``stepped`` after a step; None if
            ``stepped`` is no copy.
        gradient: The gradient of ``stepped``, a part of a bucket; None if it is the parameter's.
    """

    parameter: nn.Parameter
    placement: Placement
    name: str = ""
    order: int = 0
    stages: tuple[int, ...] = (0,)
    is_undivided: bool = False
    held: Tensor | None = field(init=False)
    held_placement: Placement = field(init=False)
    stepped: nn.Parameter | None = field(init=False)
    stepped_placement: Placement = field(init=False)
    rounded: Tensor | None = field(init=False)
    gradient: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.hold(self.parameter)
        self.step_on(self.parameter)

    def hold(self, values: Tensor | None, placement: Placement | None = None) -> None:
        """Set the values that this rank keeps between the steps; None: other ranks keep all."""
        self.held = values
        self.held_placement = placement or self.placement

    @property
    def chunk(self) -> int | None:
        """Return the stage whose backward completes the gradient; None if several contribute."""
        return self.stages[0] if len(self.stages) == 1 else None

    @property
    def steps_on_copy(self) -> bool:
        """Return True if the optimizer does not step on the parameter itself."""
        return self.stepped is not self.parameter

    def step_on(
        self,
        stepped: nn.Parameter | None,
        placement: Placement | None = None,
        *,
        rounded: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> None:
        """Set the tensor on which the optimizer steps; see the attributes."""
        self.stepped = stepped
        self.stepped_placement = placement or self.placement
        self.rounded = rounded
        self.gradient = gradient


ManagedParameters = Mapping[nn.Parameter, ManagedParameter]
"""All parameters of a rank, by identity."""


@dataclass(frozen=True, kw_only=True)
class UncutParameters:
    """Names, positions and users of the uncut model's parameters.

    Attributes:
        names: First name under which each parameter, or its later replacement, is registered.
        order: Position of each parameter, by name.
        users: Names of the modules that hold each parameter, tied ones included.
        aliases: Further names of parameters, and of saved buffers of shared modules -> the first.
    """

    names: dict[nn.Parameter, str]
    order: Mapping[str, int]
    users: Mapping[str, Sequence[str]]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> UncutParameters:
        """Return those of a module that is not cut yet."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        order = {name: index for index, name in enumerate(names.values())}
        users: dict[str, list[str]] = {}
        tied = module.named_parameters(remove_duplicate=False)
        aliases = {name: names[p] for name, p in tied if name not in order}
        first_names: dict[nn.Module, str] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            for parameter in child._parameters.values():
                if parameter is not None:
                    users.setdefault(names[parameter], []).append(name)
            first = first_names.setdefault(child, name)
            if first != name:
                # The keys of a scripted module are a list.
                saved = {*child._buffers.keys()} - child._non_persistent_buffers_set
                aliases |= {f"{name}.{key}": f"{first}.{key}" for key in saved}
        return cls(names=names, order=order, users=users, aliases=aliases)


def manage_parameters(
    module: nn.Module,
    placements: Mapping[nn.Parameter, Placement],
    uncut: UncutParameters,
    module_stages: Mapping[str, Collection[int] | None] | None,
    mesh: ProcessMesh,
    copy_groups: Mapping[int, Group],
) -> ManagedParameters:
    """Return the local parameters, with placements that know the other ranks.

    The groups of shared parameters are made here, in the same order on all ranks of a pipeline.

    Args:
        module: This rank's part.
        placements: Places of its parameters, without the other ranks.
        uncut: The uncut model's parameters.
        module_stages: Pipeline stages of each module by name, none if every stage has it; None
            without a pipeline.
        mesh: This rank's coordinates and groups.
        copy_groups: Groups of ranks that hold the same heads, by their size.
    """
    layout = mesh.layout
    pipeline_rank = mesh.group("pipeline").rank
    stages_of: dict[str, set[int]] = {}
    for name, holders in uncut.users.items():
        holder_stages = (
            [module_stages[holder] or range(layout.num_stages) for holder in holders]
            if module_stages is not None
            else [(0,)]
        )
        stages_of[name] = {stage for stages in holder_stages for stage in stages}
    ranks_of = {
        name: tuple(sorted({layout.rank_of_stage(stage) for stage in stages}))
        for name, stages in stages_of.items()
    }
    groups = {
        ranks: _holders(mesh, ranks) for ranks in sorted(set(ranks_of.values())) if len(ranks) > 1
    }
    managed = {}
    for parameter in module.parameters():
        name = uncut.names[parameter]
        ranks = ranks_of[name]
        stages = [
            stage for stage in stages_of[name] if layout.rank_of_stage(stage) == pipeline_rank
        ]
        managed[parameter] = ManagedParameter(
            parameter=parameter,
            placement=_with_others(
                placements[parameter], mesh, copy_groups, ranks[0], groups.get(ranks)
            ),
            name=name,
            order=uncut.order[name],
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
    that do, if there are several.
    """
    data_axes = mesh.layout.summed(placement.sharded)
    partial = [mesh.group(axis) for axis in placement.partial]
    sums: list[Sum] = [(None, group) for group in partial if group.size > 1]
    sums += [
        (piece.in_local, copy_groups[piece.copies])
        for piece in placement.pieces
        if piece.copies > 1
    ]
    sums += [(None, holders)] if holders is not None else []
    # axes on which an earlier rank holds the same
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

    A rank outside of ``places`` gets a group of the remaining ranks, which is not used.
    """
    pipeline = mesh.group("pipeline")
    remaining = tuple(place for place in range(pipeline.size) if place not in places)
    return mesh.subgroup("pipeline", places if pipeline.rank in places else remaining)


# ---- Notes for users about the layout of a model over the ranks ----------------------------------


_MUCH = 1 / 8
_SHOWN = 4
_INDEX = re.compile(r"\.\d+\.")


def layout_notes(
    *,
    differing: Collection[str],
    everywhere: Collection[str],
    placements: dict[str, Placement],
    padded: Collection[str],
    size: int,
) -> Iterator[str]:
    """Yield notes on a layout.

    Args:
        differing: Names of tensors that were built with different values on different ranks.
        everywhere: Names of the modules that every stage keeps.
        placements: Placements of this rank's parameters, by name.
        padded: Names of the parameters that are padded to a multiple of t.
        size: t.
    """
    if differing:
        yield (
            f"{len(differing)} tensors ({listed(differing, 3)}) had different initial values on different "
            "ranks. The values of rank 0 were broadcast"
        )
    for name, placement in placements.items():
        rows = placement.local_shape[0] * size if name in padded else 0
        full = placement.full_shape
        if rows and rows > full[0]:
            yield (
                f"'{name}': the vocabulary of {full[0]} is not divisible by "
                f"tensor_parallel_size={size}, so it is padded to {rows} rows"
            )
    for name in everywhere:
        yield (
            f"'{name}' is never called, and only its parameters are used, so every pipeline "
            "stage keeps a copy"
        )
    if size > 1:
        yield from _size_note(placements, size)


def _size_note(placements: dict[str, Placement], size: int) -> Iterator[str]:
    """Yield a note if tensor parallelism leaves many of the layers' parameters unsplit.

    An adapter around a projection, for example, leaves its attention unsplit.
    """
    matrices = [
        (_INDEX.sub(".*.", name), math.prod(held.full_shape), "tensor" in held.sharded)
        for name, held in placements.items()
        if len(held.full_shape) > 1 and _INDEX.search(name)
    ]
    total = sum(numel for _, numel, _ in matrices)
    unsplit = sum(numel for _, numel, is_split in matrices if not is_split)
    if unsplit > _MUCH * total:
        names = dict.fromkeys(name for name, _, is_split in matrices if not is_split)
        yield (
            f"tensor_parallel_size={size} leaves {unsplit / total:.0%} of the elements of the "
            "layers' matrices replicated, and every rank computes with all of them: "
            f"{listed(names, _SHOWN)}. Split them with "
            "PTDPStrategy(plan=ParallelPlan(tensor={...}))"
        )
