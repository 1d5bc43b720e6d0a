"""Tensor parallelism by a plan alone, without the other steps of ``parallelize``."""

from torch import nn

from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel import (
    ParallelPlan,
    is_in_region,
    replace_aliases,
    set_numbers,
    shard_module,
    split_sequence,
)
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.mesh import Group

__all__ = ["apply_plan"]


def apply_plan(
    model: nn.Module, plan: ParallelPlan, *, group: Group, sequence_parallel: bool
) -> dict[str, Placement]:
    """Replace the modules named by the plan with parallel ones, in place, like ``parallelize``.

    Returns:
        The placement of every parameter by its name in ``model.named_parameters()``. Under sequence
        parallelism every replicated parameter is partial: its gradient covers this rank's slice of
        the sequence.

    Raises:
        ValueError: If ``plan.check`` refuses the model.
    """
    plan.check(model, tensor_parallel_size=group.size, sequence_parallel=sequence_parallel)
    originals = list(model.parameters())  # alive while their ids are keys of `shared`
    shared: dict[int, nn.Parameter] = {}
    replaced: dict[int, nn.Module] = {}
    by_parameter: dict[int, Placement] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = plan.resolve(model)
    for name, kind in kinds.items():
        module = modules[name]
        if id(module) not in replaced:
            new, shardings = shard_module(
                module,
                kind,
                ModulePlace(
                    group=group,
                    sequence_parallel=plan.splits_sequence(name, sequence_parallel),
                    shared=shared,
                    enters=not is_in_region(name, kinds),
                ),
            )
            replaced[id(module)] = new
            by_parameter |= {
                id(new.get_parameter(key)): sharding for key, sharding in shardings.items()
            }
        _put(model, name, replaced[id(module)])
    replace_aliases(model, shared)
    set_numbers(model, plan.numbers, tensor_parallel_size=group.size)
    if sequence_parallel and group.size > 1:
        split_sequence(model, plan, group=group)
    del originals
    return {
        name: by_parameter.get(id(parameter))
        or Placement.replicated(
            parameter.shape, partial=plan.partial(name, group.size > 1 and sequence_parallel)
        )
        for name, parameter in model.named_parameters()
    }


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent).register_module(key, module)
