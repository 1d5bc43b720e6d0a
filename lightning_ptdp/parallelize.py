"""From an ordinary module to this rank's part of it: cut into stages, given values, sharded.

Read ``parallelize`` as the order in which parallelism is applied. Afterwards the module is the user's own object, holding only what
this rank needs, under the names of the uncut model; the returned record says how every local parameter sits in the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lightning_ptdp.layout import ParallelLayout
from lightning_ptdp.materialize import Materializer, agree_on_values
from lightning_ptdp.mesh import Group, ProcessMesh
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.partition import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.pipeline.stage import ModelParts, PipelineCut, Placeholder
from lightning_ptdp.records import ParameterRecord, Records, Sum
from lightning_ptdp.tensor_parallel import (
    Kind,
    ParallelPlan,
    Sharding,
    is_in_region,
    refuse_captured_parts,
    replace_aliases,
    set_numbers,
    shard_module,
    split_sequence,
)

__all__ = ["ParallelModel", "layer_ranges", "parallelize", "parts_of"]


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """What ``parallelize`` made of a module.

    Attributes:
        module: The module, changed in place.
        parts: Where its modules stand relative to the repeated container (None without a pipeline).
        ranges: Half-open layer ranges, one a stage.
        cut: This rank's stages (None without a pipeline).
        records: What is known of every local parameter.
        aliases: Further names of tied parameters -> the first name, in the uncut model.
        notes: Remarks for the user.
        split_blocks: Dotted name of the container outside of which sequence parallelism leaves the sequence whole; None: there is
            none.
    """

    module: nn.Module
    parts: ModelParts | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    cut: PipelineCut | None = None
    records: Records = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    split_blocks: str | None = None

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """Global name of every local parameter."""
        return {parameter: record.name for parameter, record in self.records.items()}

    @property
    def shardings(self) -> dict[str, Sharding]:
        """Sharding of every local parameter, by global name."""
        return {record.name: record.sharding for record in self.records.values()}


def parallelize(
    module: nn.Module,
    *,
    plan: ParallelPlan,
    mesh: ProcessMesh,
    partition: Sequence[int] | Sequence[str] | None = None,
    seed: int,
    device: torch.device,
) -> ParallelModel:
    """Make ``module`` this rank's part of itself, in place; collective over the world.

    Args:
        module: The whole module, on the meta device or with values.
        plan: What becomes of its submodules.
        mesh: This rank's place and groups.
        partition: Layers a stage, or the name of each stage's first layer, for an uneven cut on purpose.
        seed: Decides the initial values of meta modules.
        device: Where parameters go.

    Raises:
        ValueError: The plan, the partition or the sizes do not fit the model.
    """
    layout = mesh.layout
    tensor, pipeline = mesh.group("tensor"), mesh.group("pipeline")
    kinds = plan.resolve(module) if tensor.size > 1 else {}
    plan.check(module, tensor.size, layout.sequence_parallel, converted=True)
    if layout.model_parallel_size > 1:
        set_numbers(module, plan.numbers, tensor_parallel_size=tensor.size)
    notes = _agree(module, device)
    original = list(module.named_parameters())
    names = {id(parameter): name for name, parameter in original}
    order = {name: index for index, (name, _) in enumerate(original)}
    users = _users(module, names)
    aliases = {alias: names[id(p)] for alias, p in module.named_parameters(remove_duplicate=False) if alias not in order}
    materialize = Materializer(module, seed=seed, device=device)

    parts: ModelParts | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    cut: PipelineCut | None = None
    if pipeline.size > 1:
        parts = parts_of(module, plan)
        ranges = layer_ranges(module, parts=parts, layout=layout, partition=partition)
        stages = layout.stages_of(pipeline.rank)
        cut = PipelineCut(module, parts=parts, ranges=ranges, stages=stages, collects=plan.collects)
    module_stages = (
        cut.module_stages
        if cut is not None
        else dict.fromkeys((name for name, _ in module.named_modules(remove_duplicate=False)), frozenset([0]))
    )

    shardings = _build_local(module, plan, kinds, materialize, names, users, mesh)
    if tensor.size > 1:
        refuse_captured_parts(module, sequence_parallel=layout.sequence_parallel)
    copies = {c for kind in kinds.values() for c in kind.copies(tensor.size)}
    copy_groups = {c: _copies(mesh, c) for c in sorted(copies - {1})}
    records = _records(module, shardings, names, order, users, module_stages, mesh, copy_groups)
    padded = {name for name, kind in kinds.items() if kind.pads}
    split = [record for record in records.values() if padded.intersection(users[record.name])]
    kept = parts.everywhere if parts is not None else ()
    notes = (
        *notes,
        *_padding_notes(split, tensor.size),
        *map(_kept_note, kept),
        *_whole_notes(records.values(), tensor.size),
    )
    return ParallelModel(
        module=module,
        parts=parts,
        ranges=ranges,
        cut=cut,
        records=records,
        aliases=aliases,
        notes=notes,
        split_blocks=plan.split_blocks if layout.sequence_parallel and plan.sequence == "blocks" else None,
    )


def _whole_notes(records: Iterable[ParameterRecord], size: int) -> Iterator[str]:
    """What tensor parallelism leaves whole in the layers, if it is much: an adapter around a projection leaves its attention unsplit."""
    layers = [r for r in records if len(r.sharding.full_shape) > 1 and _INDEX.search(r.name)]
    matrices = [(_INDEX.sub(".*.", r.name), math.prod(r.sharding.full_shape), "tensor" in r.sharding.sharded) for r in layers]
    total = sum(numel for _, numel, _ in matrices)
    whole = sum(numel for _, numel, is_split in matrices if not is_split)
    if size > 1 and whole > _MUCH * total:
        names = list(dict.fromkeys(name for name, _, is_split in matrices if not is_split))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield (
            f"{whole / total:.0%} of the elements of the layers' matrices are not split by tensor_parallel_size={size}, and every rank "
            f"computes with them whole: {', '.join(names[:_SHOWN])}{more}. Split them with PTDPStrategy(plan=ParallelPlan(tensor={{...}}))"
        )


_MUCH, _SHOWN, _INDEX = 1 / 8, 4, re.compile(r"\.\d+\.")


def _kept_note(name: str) -> str:
    return f"'{name}' is used without being called (its parameters alone are), so every pipeline stage keeps it"


def _padding_notes(records: Iterable[ParameterRecord], size: int) -> tuple[str, ...]:
    return tuple(
        f"'{r.name}': vocabulary of {r.sharding.full_shape[0]} is not divisible by tensor_parallel_size={size} and is padded to "
        f"{r.sharding.local_shape[0] * size} rows"
        for r in records
        if r.sharding.local_shape[0] * size > r.sharding.full_shape[0]
    )


def parts_of(module: nn.Module, plan: ParallelPlan) -> ModelParts:
    """Where the modules of the whole ``module`` stand, as the plan says and the model shows.

    Raises:
        ValueError: Of ``find_parts``.
    """
    return find_parts(
        module, blocks=plan.blocks, before=plan.before, between=plan.between, after=plan.after, everywhere=plan.everywhere
    )


def layer_ranges(
    module: nn.Module,
    *,
    parts: ModelParts,
    layout: ParallelLayout,
    partition: Sequence[int] | Sequence[str] | None = None,
) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges of all stages: as ``partition`` says, else balanced by cost, embedding and head counted.

    What a microbatch costs is counted in multiply-adds a token of its forward: one for each element of a matrix. The backward takes
    twice that everywhere, so it changes no comparison. Attention scores are left out: they are the same in every layer.

    An embedding multiplies nothing, but moves memory. Of its V x h elements a microbatch writes a gradient of zeros, scatters the
    tokens' gradients into it and adds it to the sum: 4 passes of 4 bytes, 16 V h bytes. A head of the same size takes 6 V h floating
    point operations a token. On a device that does about 100 of these while it moves a byte (an accelerator at the rate that training
    reaches), and with T tokens a microbatch, the embedding costs 16 * 100 / (6 T) of such a head: about an eighth at T = 2048. T is
    not known here; the eighth stands for "little, but not nothing".

    Args:
        module: The whole module.
        parts: Where its modules stand.
        layout: The degrees of parallelism.
        partition: Layers of each stage, or names of the first layer of each stage.

    Raises:
        ValueError: There are fewer layers than stages, or ``partition`` does not fit.
    """
    layers = layers_of(module, parts.blocks)
    if partition is not None:
        return explicit_partition(partition, layers=[layer.name for layer in layers], num_stages=layout.num_stages)
    check_num_layers(
        len(layers),
        pipeline_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_size=layout.virtual_pipeline_size,
    )
    before, between, after = (
        sum(_cost(module.get_submodule(name)) for name in names) for names in (parts.before, parts.between, parts.after)
    )
    costs = [_cost(module.get_submodule(layer.name)) or 1.0 for layer in layers]
    costs = [cost + between * (layer.is_first and layer.container > 0) for cost, layer in zip(costs, layers, strict=True)]
    return partition_layers(costs, num_stages=layout.num_stages, first_cost=before, last_cost=after)


_LOOKUP_COST = 1 / 8
"""Of one multiply-add, for an element of an embedding (``layer_ranges``)."""


def _cost(module: nn.Module) -> float:
    """Multiply-adds a token, or what takes as long."""
    matrices = [(m, p.numel()) for m in module.modules() for p in m._parameters.values() if p is not None and p.dim() > 1]
    return sum(elements * (_LOOKUP_COST if isinstance(m, nn.Embedding) else 1.0) for m, elements in matrices)


def _agree(module: nn.Module, device: torch.device) -> tuple[str, ...]:
    values = [(n, t) for n, t in (*module.named_parameters(), *module.named_buffers()) if not t.is_meta]
    differing = agree_on_values(values, device=device)
    if not differing:
        return ()
    shown = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    return (f"{len(differing)} tensors ({shown}) were built with different values on different ranks; rank 0's were broadcast",)


def _users(module: nn.Module, names: Mapping[int, str]) -> dict[str, list[str]]:
    """Names of the modules that hold each parameter, tied ones included."""
    users: dict[str, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        for parameter in child._parameters.values():
            if parameter is not None:
                users.setdefault(names[id(parameter)], []).append(name)
    return users


def _build_local(
    module: nn.Module,
    plan: ParallelPlan,
    kinds: Mapping[str, Kind],
    materialize: Materializer,
    names: dict[int, str],
    users: Mapping[str, list[str]],
    mesh: ProcessMesh,
) -> dict[int, Sharding]:
    """Give values to and shard what is left in the tree, one module at a time; keeps ``names`` up to date."""
    group, sequence_parallel = mesh.group("tensor"), mesh.layout.sequence_parallel and mesh.group("tensor").size > 1
    shared: dict[int, nn.Parameter] = {}
    kept: list[object] = []  # parameters whose ids are keys must stay alive, or another would get the same id
    shardings: dict[int, Sharding] = {}
    places = _places(module)
    for name, child in list(module.named_modules()):
        kind = None if isinstance(child, Placeholder) else kinds.get(name)
        # A kind may speak for a module with children, which then need their values first.
        for suffix, part in [("", child)] if kind is None or kind.keeps_children else child.named_modules():
            _give_values(part, f"{name}.{suffix}" if suffix else name, materialize, names, kept)
        if kind is None:
            continue
        old = dict(child.named_parameters())
        kept.extend(old.values())
        splits = plan.splits_sequence(name, sequence_parallel)
        new, own = shard_module(
            child, kind, group=group, sequence_parallel=splits, shared=shared, enters=not is_in_region(name, kinds)
        )
        for parent, key in places[id(child)] if new is not child else ():
            parent._modules[key] = new
        for key, sharding in own.items():
            parameter = new.get_parameter(key)
            kept.append(parameter)
            names[id(parameter)], shardings[id(parameter)] = names[id(old[key])], sharding
            if parameter is not old[key] and len(users[names[id(parameter)]]) == 1:
                old[key].data = old[key].data.new_empty(0)  # the slice is a copy: the full value is not held any longer
    replace_aliases(module, shared)
    for name, parameter in module.named_parameters():
        if id(parameter) not in shardings:
            shardings[id(parameter)] = Sharding.replicated(parameter.shape, partial=plan.partial(name, sequence_parallel))
    if sequence_parallel:
        split_sequence(module, plan, group=group)
    return shardings


def _places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each module is registered; a module may have several names."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((parent, key))
    return places


def _give_values(module: nn.Module, name: str, materialize: Materializer, names: dict[int, str], kept: list[object]) -> None:
    before = dict(module._parameters)
    kept.extend(before.values())
    materialize(module, name)
    kept.extend(module._parameters.values())
    for key, parameter in module._parameters.items():
        old = before[key]
        if parameter is not None and old is not None:
            names[id(parameter)] = names[id(old)]


def _records(
    module: nn.Module,
    shardings: Mapping[int, Sharding],
    names: Mapping[int, str],
    order: Mapping[str, int],
    users: Mapping[str, list[str]],
    module_stages: Mapping[str, frozenset[int] | None],
    mesh: ProcessMesh,
    copy_groups: Mapping[int, Group],
) -> dict[nn.Parameter, ParameterRecord]:
    """Records of the local parameters; makes the groups of shared ones (in the same order on all ranks of a pipeline)."""
    pipeline, layout = mesh.group("pipeline"), mesh.layout
    same, other = ([axis.name for axis in layout.axes if (axis.reads == "same") == alike] for alike in (True, False))
    stages_of: dict[str, set[int]] = {}
    for name, holders in users.items():
        found = [module_stages[holder] or range(layout.num_stages) for holder in holders]
        stages_of[name] = {stage for stages in found for stage in stages}
    ranks_of = {name: tuple(sorted({layout.rank_of_stage(stage) for stage in stages})) for name, stages in stages_of.items()}
    groups = {ranks: _holders(mesh, ranks) for ranks in sorted(set(ranks_of.values())) if len(ranks) > 1}
    records = {}
    for parameter in module.parameters():
        name, sharding = names[id(parameter)], shardings[id(parameter)]
        data_axes = tuple(axis for axis in other if axis not in sharding.sharded)
        sharding = replace(sharding, sharded=(*sharding.sharded, "pipeline"), partial=(*sharding.partial, *data_axes))
        ranks = ranks_of[name]
        alike = [mesh.group(axis) for axis in same if axis not in sharding.sharded]
        sums: list[Sum] = [((), mesh.group(axis)) for axis in sharding.partial if axis in same and mesh.group(axis).size > 1]
        sums += [(piece.local_slices, copy_groups[piece.copies]) for piece in sharding.pieces if piece.copies > 1]
        sums += [((), groups[ranks])] if ranks in groups else []
        records[parameter] = ParameterRecord(
            name=name,
            order=order[name],
            sharding=sharding,
            stages=tuple(sorted(stage for stage in stages_of[name] if layout.rank_of_stage(stage) == pipeline.rank)),
            data_axes=data_axes,
            sums=tuple(sums),
            tied=ranks in groups,
            counted=pipeline.rank == ranks[0] and all(group.rank == 0 for group in alike),
        )
    return records


def _holders(mesh: ProcessMesh, places: tuple[int, ...]) -> Group:
    """The group of the pipeline ranks at ``places``; on another rank one of the others among themselves, which has no use."""
    pipeline = mesh.group("pipeline")
    others = tuple(place for place in range(pipeline.size) if place not in places)
    return mesh.subgroup("pipeline", places if pipeline.rank in places else others)


def _copies(mesh: ProcessMesh, copies: int) -> Group:
    """The ``copies`` neighbouring members of the tensor group, this rank among them, that hold the same heads."""
    start = mesh.group("tensor").rank // copies * copies
    return mesh.subgroup("tensor", tuple(range(start, start + copies)))
