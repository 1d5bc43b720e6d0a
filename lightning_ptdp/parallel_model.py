"""This rank's part of a module, its construction module by module, and its description."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from lightning_ptdp.base.errors import listed
from lightning_ptdp.data_parallel.sharded_parameters import Direction, ShardedParameters
from lightning_ptdp.forward.matrix_product import StepCasts
from lightning_ptdp.parameters.managed_parameter import ManagedParameters, UncutParameters
from lightning_ptdp.parameters.materialize import Materializer
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.parameters.structure_copies import UncutView
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.tensor_parallel import (
    SPLIT_AXES,
    Kind,
    ModulePlace,
    ParallelPlan,
    is_in_region,
    replace_aliases,
    shard_module,
    split_sequence,
)
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """Result of ``parallelize``.

    Attributes:
        module: The module, changed in place.
        plan: Plan of its submodules.
        cut: This rank's stages (None without a pipeline).
        parameters: All local parameters.
        aliases: Further names of tied parameters, and of buffers of shared modules -> the first
            name, in the uncut model.
        names: Names of all parameters of the uncut model, tied ones once.
        uncut: The uncut module's structure; None if every rank has all of it.
        notes: Notes for the user.
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
    uncut: UncutView | None = None
    notes: tuple[str, ...] = ()
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
                "the optimizer. A copy that is not trained needs requires_grad_(False)"
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

    def copied(self, axis: str) -> dict[str, nn.Parameter]:
        """Return the trained parameters that ``axis`` does not split, by name.

        There are none if the parameters are sharded over replicas.
        """
        if self.shards is not None:
            return {}
        return {
            managed.name: p
            for p, managed in self.parameters.items()
            if axis not in managed.placement.sharded and p.requires_grad
        }

    @property
    def blocks(self) -> Blocks | None:
        """Return the dotted names of the repeated containers; None: unknown."""
        return self.cut.parts.blocks if self.cut is not None else self.plan.blocks

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open layer ranges, one per stage; none without a pipeline."""
        return self.cut.ranges if self.cut is not None else ()


def checked_kinds(
    module: nn.Module, plan: ParallelPlan, layout: ParallelLayout, *, converted: bool
) -> dict[str, Kind]:
    """Return the kinds of the modules that a layout divides, by name, after checking the plan.

    Args:
        module: The whole module.
        plan: Plan of its submodules.
        layout: The degrees of parallelism.
        converted: Whether precision plugins may have replaced modules.

    Raises:
        ValueError: The plan does not fit the module or the layout.
    """
    degrees = {axis: layout.size(axis) for axis in SPLIT_AXES}
    tensor = degrees["tensor"]
    plan.check(module, tensor, layout.sequence_parallel, converted=converted, **degrees)
    return plan.divided(module, **degrees)


def build_local(
    module: nn.Module,
    plan: ParallelPlan,
    kinds: Mapping[str, Kind],
    materialize: Materializer,
    uncut: UncutParameters,
    mesh: ProcessMesh,
) -> dict[nn.Parameter, Placement]:
    """Give values to the local modules and shard them, one module at a time.

    Keeps ``uncut.names`` up to date.
    """
    tensor = mesh.group("tensor")
    sequence_parallel = mesh.layout.sequence_parallel and mesh.group("tensor").size > 1
    shared: dict[int, nn.Parameter] = {}
    placements: dict[nn.Parameter, Placement] = {}
    places = _places(module)
    names = uncut.names
    for name, child in list(module.named_modules()):
        kind = None if isinstance(child, Placeholder) else kinds.get(name)
        # A kind may apply to a module with children, which then need their values first.
        for suffix, part in (
            [("", child)] if kind is None or kind.keeps_children else child.named_modules()
        ):
            before = dict(part._parameters)
            materialize(part, f"{name}.{suffix}" if suffix else name)
            for new, old in zip(part._parameters.values(), before.values(), strict=True):
                if new is not None:
                    names[new] = names[old]
        if kind is None:
            continue
        originals = dict(child.named_parameters())
        splits = plan.splits_sequence(name, sequence_parallel)
        divided, local_placements = shard_module(
            child,
            kind,
            ModulePlace(
                group=mesh.group(kind.axis),
                sequence_parallel=splits,
                shared=shared,
                enters=not is_in_region(name, kinds),
                tensor=tensor,
                name=name,
            ),
        )
        for parent, key in places[child] if divided is not child else ():
            parent._modules[key] = divided
        for key, placement in local_placements.items():
            parameter = divided.get_parameter(key)
            original = originals[key]
            names[parameter] = names[original]
            placements[parameter] = placement
            if parameter is not original and len(uncut.users[names[parameter]]) == 1:
                # The slice is a copy. Release the full value.
                original.data = original.data.new_empty(0)
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

    A module may have several names.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    return places
