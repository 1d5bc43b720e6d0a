"""From an ordinary module to its parallel version, with the local part of its present values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_ptdp.parameters.sharding import Sharding
from lightning_ptdp.tensor_parallel.kinds import Kind, Place
from lightning_ptdp.tensor_parallel.parallel_plan import ParallelPlan
from lightning_ptdp.tensor_parallel.patterns import matches
from lightning_ptdp.tensor_parallel.region import split_sequence_in_blocks
from lightning_ptdp.world.mesh import Group

__all__ = ["is_in_region", "replace_aliases", "shard_module", "split_sequence"]

Shared = dict[int, nn.Parameter]
_ALONE = Group()


def shard_module(
    module: nn.Module,
    kind: Kind,
    *,
    group: Group,
    sequence_parallel: bool,
    shared: Shared,
    enters: bool = True,
    tensor: Group = _ALONE,
    name: str = "",
) -> tuple[nn.Module, dict[str, Sharding]]:
    """The parallel version of one module and the shardings of its parameters, by their names in it.

    Dtype, device (meta included), ``requires_grad``, training mode and the parameters' own Python
    attributes are kept; forward hooks are not. A ``Position`` module without sequence parallelism,
    a ``Partial`` or ``Alias`` one, and every module in a group of one come back as they are, a
    ``Region`` with hooks of its own; aliases are mended by ``replace_aliases``, and a ``Whole``
    module by ``split_sequence``, once all modules have been sharded.

    Args:
        module: A module that ``plan.check`` has passed.
        kind: How to shard it.
        group: That of the kind's axis.
        sequence_parallel: Whether activations around it are split along the sequence.
        shared: ``id`` of an original parameter -> its new one, read and extended here: tied weights
            stay one parameter. The caller keeps the originals alive as long as it, since Python
            reuses ids.
        enters: Whether no region is around it that sums its input's gradient.
        tensor: The tensor group.
        name: Of the module, for messages.

    Returns:
        The module to put in its place, and a sharding for each parameter.
    """
    if group.size == tensor.size == 1:
        return module, {
            name: Sharding.replicated(parameter.shape)
            for name, parameter in module.named_parameters()
        }
    place = Place(
        group=group,
        sequence_parallel=sequence_parallel,
        shared=shared,
        enters=enters,
        tensor=tensor,
        name=name,
    )
    return kind.shard(module, place)


def is_in_region(name: str, kinds: Mapping[str, Kind]) -> bool:
    """Return True if a module around ``name`` is a region."""
    while name:
        name = name.rpartition(".")[0]
        if (kind := kinds.get(name)) is not None and kind.is_region:
            return True
    return False


def split_sequence(model: nn.Module, plan: ParallelPlan, *, group: Group) -> None:
    """Put in place what splits and joins the sequence under sequence parallelism, beside the
    sharded modules themselves."""
    for name, module in model.named_modules():
        for kind in {kind for pattern, kind in plan.kinds.items() if matches(name, pattern)}:
            kind.complete(module, group=group)
    if plan.sequence == "blocks":
        blocks = list(model.get_submodule(plan.split_blocks).children())
        # A block that lives on another pipeline stage has no parts, and nothing is split there.
        first, last = (
            block if list(block.children()) else None for block in (blocks[0], blocks[-1])
        )
        split_sequence_in_blocks(first, last, group=group)


def replace_aliases(model: nn.Module, shared: Shared) -> None:
    """Let every module that holds an original parameter of a sharded one hold the sharded one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in shared:
                module._parameters[key] = shared[id(parameter)]
