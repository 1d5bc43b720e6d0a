"""From an ordinary module to its parallel version, with the local part of its present values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_ptdp.mesh import Group
from lightning_ptdp.tensor_parallel.kinds import Column, Kind, Partial, Position, Row, Vocabulary
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_ptdp.tensor_parallel.plan import ParallelPlan
from lightning_ptdp.tensor_parallel.position import SequenceShardedEmbedding
from lightning_ptdp.tensor_parallel.sharding import (
    Sharding,
    VocabularyRange,
    shard_columns,
    shard_rows,
    shard_vocabulary,
    slice_full,
)
from lightning_ptdp.tensor_parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = ["apply_plan", "shard_module"]

Shared = dict[int, nn.Parameter]


def shard_module(
    module: nn.Module, kind: Kind, *, group: Group, sequence_parallel: bool, shared: Shared
) -> tuple[nn.Module, dict[str, Sharding]]:
    """The parallel version of one module and the shardings of its parameters, by their names in it.

    Dtype, device (meta included), ``requires_grad``, training mode and the parameters' own Python attributes are kept; forward
    hooks are not. A ``Position`` module without sequence parallelism, a ``Partial`` one, and every module in a group of one come
    back as they are.

    Args:
        module: A module that ``plan.check`` has passed.
        kind: How to spread it.
        group: The tensor group.
        sequence_parallel: Whether activations around it are split along the sequence.
        shared: ``id`` of an original parameter -> its new one, read and extended here: tied weights stay one parameter. The caller
            keeps the originals alive as long as it, since Python reuses ids.

    Returns:
        The module to put in its place, and a sharding for each parameter.
    """
    if group.size == 1:
        return module, _whole(module, partial=False)
    if isinstance(kind, Partial) or (isinstance(kind, Position) and not sequence_parallel):
        return module, _whole(module, partial=sequence_parallel or isinstance(kind, Partial))
    shardings = _shardings(module, kind, group=group, partial=sequence_parallel)
    local = {name: _local_parameter(module, name, sharding, shared) for name, sharding in shardings.items()}
    weight, bias = local["weight"], local.get("bias")
    new: nn.Module
    match kind:
        case Column(parts=parts):
            new = ColumnParallelLinear(weight, bias, parts=parts, group=group, sequence_parallel=sequence_parallel)
        case Row():
            new = RowParallelLinear(weight, bias, group=group, sequence_parallel=sequence_parallel)
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
    for name, kind in plan.resolve(model).items():
        module = modules[name]
        if id(module) not in replaced:
            new, shardings = shard_module(module, kind, group=group, sequence_parallel=sequence_parallel, shared=shared)
            replaced[id(module)] = new
            by_parameter |= {id(new.get_parameter(key)): sharding for key, sharding in shardings.items()}
        _put(model, name, replaced[id(module)])
    del originals
    partial = sequence_parallel and group.size > 1
    return {
        name: by_parameter.get(id(parameter)) or Sharding.replicated(parameter.shape, partial=partial)
        for name, parameter in model.named_parameters()
    }


def _shardings(module: nn.Module, kind: Kind, *, group: Group, partial: bool) -> dict[str, Sharding]:
    sizes = _shapes(module)
    match kind:
        case Column(parts=parts):
            found = {
                name: shard_columns(shape, parts=parts or (shape[0],), size=group.size, index=group.rank)
                for name, shape in sizes.items()
            }
        case Row():
            found = {name: Sharding.replicated(shape, partial=partial) for name, shape in sizes.items()}
            found["weight"] = shard_rows(sizes["weight"], size=group.size, index=group.rank)
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
