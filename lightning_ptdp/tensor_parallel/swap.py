"""From an ordinary module to its parallel version, with the local part of its present values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_ptdp.mesh import Group
from lightning_ptdp.tensor_parallel.attention import ParallelMultiheadAttention
from lightning_ptdp.tensor_parallel.kinds import Alias, Attention, Column, Kind, Partial, Position, Region, Row, Vocabulary, Whole
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ptdp.tensor_parallel.linear_like import is_conv1d, stores_outputs_last
from lightning_ptdp.tensor_parallel.numbers import set_numbers
from lightning_ptdp.tensor_parallel.patterns import matches
from lightning_ptdp.tensor_parallel.plan import ParallelPlan
from lightning_ptdp.tensor_parallel.position import SequenceShardedEmbedding
from lightning_ptdp.tensor_parallel.region import enter_region, is_in_region, join_sequence_in_whole, split_sequence_in_blocks
from lightning_ptdp.tensor_parallel.sharding import (
    Sharding,
    VocabularyRange,
    shard_columns,
    shard_rows,
    shard_vocabulary,
    slice_full,
)
from lightning_ptdp.tensor_parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = ["apply_plan", "replace_aliases", "shard_module", "split_sequence"]

Shared = dict[int, nn.Parameter]


def shard_module(
    module: nn.Module, kind: Kind, *, group: Group, sequence_parallel: bool, shared: Shared, enters: bool = True
) -> tuple[nn.Module, dict[str, Sharding]]:
    """The parallel version of one module and the shardings of its parameters, by their names in it.

    Dtype, device (meta included), ``requires_grad``, training mode and the parameters' own Python attributes are kept; forward
    hooks are not. A ``Position`` module without sequence parallelism, a ``Partial`` or ``Alias`` one, and every module in a group
    of one come back as they are, a ``Region`` with hooks of its own; aliases are mended by ``replace_aliases``, and a ``Whole`` module
    by ``split_sequence``, once all modules have been spread.

    Args:
        module: A module that ``plan.check`` has passed.
        kind: How to spread it.
        group: The tensor group.
        sequence_parallel: Whether activations around it are split along the sequence.
        shared: ``id`` of an original parameter -> its new one, read and extended here: tied weights stay one parameter. The caller
            keeps the originals alive as long as it, since Python reuses ids.
        enters: Whether no region is around it that sums its input's gradient.

    Returns:
        The module to put in its place, and a sharding for each parameter.
    """
    if group.size == 1:
        return module, _whole(module, partial=False)
    if isinstance(kind, Region):
        enter_region(module, kind, group=group, sequence_parallel=sequence_parallel)
        return module, _own_of_heads(module, kind, group=group, shared=shared)
    if isinstance(kind, Alias | Whole):
        return module, {}
    if isinstance(kind, Partial) or (isinstance(kind, Position) and not sequence_parallel):
        return module, _whole(module, partial=sequence_parallel or isinstance(kind, Partial))
    shardings = _shardings(module, kind, group=group, partial=sequence_parallel)
    local = {name: _local_parameter(module, name, sharding, shared) for name, sharding in shardings.items()}
    new: nn.Module
    if isinstance(kind, Attention):
        assert isinstance(module, nn.MultiheadAttention)
        out = RowParallelLinear(
            local["out_proj.weight"], local.get("out_proj.bias"), group=group, sequence_parallel=sequence_parallel
        )
        new = ParallelMultiheadAttention(
            local["in_proj_weight"],
            local.get("in_proj_bias"),
            out,
            num_heads=module.num_heads,
            dropout=module.dropout,
            batch_first=module.batch_first,
            group=group,
            sequence_parallel=sequence_parallel,
        )
        return new.train(module.training), shardings
    weight, bias, transposed = local["weight"], local.get("bias"), is_conv1d(module)
    match kind:
        case Column() if isinstance(module, nn.Embedding):
            # Who looks up needs no other ranks: neither is there a gradient of ids to sum, nor does the output leave.
            new = nn.Embedding(weight.size(0), weight.size(1), module.padding_idx, device="meta")
            new.weight = weight
        case Column(parts=parts):
            new = ColumnParallelLinear(
                weight,
                bias,
                parts=parts or (shardings["weight"].full_shape[1 if transposed else 0],),
                transposed=transposed,
                enters=enters,
                group=group,
                sequence_parallel=sequence_parallel,
            )
        case Row():
            new = RowParallelLinear(weight, bias, transposed=transposed, group=group, sequence_parallel=sequence_parallel)
        case Position():
            assert isinstance(module, nn.Embedding)
            new = SequenceShardedEmbedding(weight, padding_idx=module.padding_idx, group=group)
        case Vocabulary() if isinstance(module, nn.Embedding):
            words = _vocabulary(module.num_embeddings, group)
            new = VocabularyParallelEmbedding(
                weight, vocabulary=words, padding_idx=module.padding_idx, group=group, sequence_parallel=sequence_parallel
            )
        case Vocabulary():
            assert isinstance(module, nn.Linear)
            words = _vocabulary(module.out_features, group)
            new = VocabularyParallelHead(weight, bias, vocabulary=words, group=group, sequence_parallel=sequence_parallel)
    return new.train(module.training), shardings


def _own_of_heads(module: nn.Module, kind: Region, *, group: Group, shared: Shared) -> dict[str, Sharding]:
    """Split the module's own parameters that have an element for each head, in place."""
    shapes = {key: tuple(module.get_parameter(key).shape) for key in kind.per_head}
    found = {key: shard_columns(shape, parts=shape[:1], size=group.size, index=group.rank) for key, shape in shapes.items()}
    for key, sharding in found.items():
        module.register_parameter(key, _local_parameter(module, key, sharding, shared))
    return found


def split_sequence(model: nn.Module, plan: ParallelPlan, *, group: Group) -> None:
    """Put in place what splits and joins the sequence under sequence parallelism, beside the spread modules themselves."""
    whole = [pattern for pattern, kind in plan.tensor.items() if isinstance(kind, Whole)]
    found = (module for name, module in model.named_modules() if any(matches(name, pattern) for pattern in whole))
    join_sequence_in_whole(found, group=group)
    if plan.sequence == "blocks":
        blocks = list(model.get_submodule(plan.split_blocks).children())
        # A block that lives on another pipeline stage has no parts, and nothing is split there.
        first, last = (block if list(block.children()) else None for block in (blocks[0], blocks[-1]))
        split_sequence_in_blocks(first, last, group=group)


def replace_aliases(model: nn.Module, shared: Shared) -> None:
    """Let every module that holds an original parameter of a spread one hold the spread one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in shared:
                module._parameters[key] = shared[id(parameter)]


def apply_plan(model: nn.Module, plan: ParallelPlan, *, group: Group, sequence_parallel: bool) -> dict[str, Sharding]:
    """Replace the modules that the plan names by parallel ones, in place.

    Returns:
        The sharding of every parameter, by the name that ``model.named_parameters()`` gives to it. Under sequence parallelism every
        whole parameter is partial: its gradient covers this rank's slice of the sequence.

    Raises:
        ValueError: Of ``plan.check``.
    """
    plan.check(model, tensor_parallel_size=group.size, sequence_parallel=sequence_parallel)
    originals = list(model.parameters())  # alive while their ids are keys of `shared`
    shared: Shared = {}
    replaced: dict[int, nn.Module] = {}
    by_parameter: dict[int, Sharding] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = plan.resolve(model)
    for name, kind in kinds.items():
        module = modules[name]
        if id(module) not in replaced:
            new, shardings = shard_module(
                module,
                kind,
                group=group,
                sequence_parallel=plan.splits_sequence(name, sequence_parallel),
                shared=shared,
                enters=not is_in_region(name, kinds),
            )
            replaced[id(module)] = new
            by_parameter |= {id(new.get_parameter(key)): sharding for key, sharding in shardings.items()}
        _put(model, name, replaced[id(module)])
    replace_aliases(model, shared)
    set_numbers(model, plan.numbers, tensor_parallel_size=group.size)
    if sequence_parallel and group.size > 1:
        split_sequence(model, plan, group=group)
    del originals
    return {
        name: by_parameter.get(id(parameter))
        or Sharding.replicated(parameter.shape, partial=group.size > 1 and plan.splits_sequence(name, sequence_parallel))
        for name, parameter in model.named_parameters()
    }


def _shardings(module: nn.Module, kind: Kind, *, group: Group, partial: bool) -> dict[str, Sharding]:
    sizes = _shapes(module)
    match kind:
        case Column():
            found = {
                name: shard_columns(
                    shape,
                    parts=kind.part_sizes(shape[dim := len(shape) - 1 if stores_outputs_last(module) else 0]),
                    size=group.size,
                    index=group.rank,
                    copies=kind.copies(group.size),
                    dim=dim,
                )
                for name, shape in sizes.items()
            }
        case Row() | Attention():
            found = {name: Sharding.replicated(shape, partial=partial) for name, shape in sizes.items()}
            weight = "weight" if isinstance(kind, Row) else "out_proj.weight"
            dim = 0 if is_conv1d(module) else 1
            found[weight] = shard_rows(sizes[weight], size=group.size, index=group.rank, dim=dim)
            for name in sizes.keys() & {"in_proj_weight", "in_proj_bias"}:
                width = sizes[name][0] // 3
                found[name] = shard_columns(sizes[name], parts=(width,) * 3, size=group.size, index=group.rank)
        case Vocabulary():
            words = _vocabulary(sizes["weight"][0], group)
            found = {name: shard_vocabulary(shape, words) for name, shape in sizes.items()}
        case _:
            found = {name: Sharding.replicated(shape, partial=partial) for name, shape in sizes.items()}
    return found


def _shapes(module: nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _vocabulary(size: int, group: Group) -> VocabularyRange:
    return VocabularyRange(size=size, parts=group.size, index=group.rank)


def _local_parameter(module: nn.Module, name: str, sharding: Sharding, shared: Shared) -> nn.Parameter:
    original = module.get_parameter(name)
    if id(original) in shared:
        return shared[id(original)]
    if sharding.axis is None:
        new = original
    else:
        with torch.no_grad():
            new = nn.Parameter(slice_full(original, sharding), requires_grad=original.requires_grad)
        vars(new).update(vars(original))  # marks that optimizers and initializers read
    shared[id(original)] = new
    return new


def _whole(module: nn.Module, *, partial: bool) -> dict[str, Sharding]:
    return {name: Sharding.replicated(parameter.shape, partial=partial) for name, parameter in module.named_parameters()}


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent).register_module(key, module)
