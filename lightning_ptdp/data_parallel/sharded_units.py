"""Units of sharded parameters: what replicas gather together, and how it is stored.

A unit holds the parameters of one block, or those of a stage outside of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_ptdp.blocks.local_blocks import local_blocks
from lightning_ptdp.data_parallel.flat_parameters import FlatParameters, lay_out
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.data_parallel.rounded_parameters import RoundedParameters
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.shims.quantization import elements_of, is_packed

Gathered = FlatParameters | RoundedParameters
"""A storage, or its values in float8."""


@dataclass(eq=False, kw_only=True)
class Unit:
    """Parameters that are gathered and freed together.

    Attributes:
        block: The block that uses them; None: they are outside of the blocks.
        chunk: The stage; None: several.
        flats: Their storage.
        gathered: What the running pass gathers: a storage, or its values in float8.
        usual: What a pass gathers first.
        before, after: The neighbouring blocks of the same stage.
    """

    block: nn.Module | None
    chunk: int | None
    flats: Sequence[FlatParameters]
    gathered: Sequence[Gathered] = ()
    usual: Sequence[Gathered] = ()
    before: Unit | None = None
    after: Unit | None = None

    def start(self) -> None:
        """Start to gather what is missing."""
        for gathered in self.gathered:
            gathered.start_gather()


def make_units(
    module: nn.Module,
    parameters: ManagedParameters,
    blocks: Blocks | None,
    reductions: Mapping[tuple[str, ...], Reduction],
    lay_out: Callable[[list[ManagedParameter]], Iterable[FlatParameters]],
) -> Iterator[Unit]:
    """Yield the units of a rank, those of blocks in forward order.

    A parameter that several blocks use belongs to no block. These parameters are not sharded: those
    that have no other rank to be sharded over, those of special classes, and those of torch.jit
    modules, which read them without Python.
    """
    scripted = {
        parameter
        for child in module.modules()
        if isinstance(child, torch.jit.ScriptModule)
        for parameter in child.parameters()
    }
    try:
        local = [block.module for block in local_blocks(module, blocks)]
    except ValueError:  # nothing is repeated
        local = []
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for block in local:
        for parameter in nn.Module.parameters(block):
            users.setdefault(parameter, set()).add(block)
    members: dict[tuple[nn.Module | None, int | None], list[ManagedParameter]] = {
        (block, None): [] for block in local
    }
    for managed in sorted(parameters.values(), key=lambda managed: managed.order):
        using = [*users.get(managed.parameter, ())]
        user = using[0] if len(using) == 1 else None
        is_shared = managed.parameter not in scripted and _is_plain(managed.parameter)
        if reductions[managed.placement.data_axes].scatter and is_shared:
            key = (user, None) if user is not None else (None, managed.chunk)
            members.setdefault(key, []).append(managed)
    before: Unit | None = None
    for (user, _), group in members.items():
        if not group:
            continue
        chunk = group[0].chunk
        unit = Unit(block=user, chunk=chunk, flats=[*lay_out(group)])
        if user is not None:
            if before is not None and before.chunk == chunk:
                before.after = unit
                unit.before = before
            before = unit
        yield unit


def lay_out_unit(
    group: Iterable[ManagedParameter],
    reductions: Mapping[tuple[str, ...], Reduction],
    make: Callable[..., FlatParameters],
    rounded: Container[nn.Parameter],
) -> Iterator[FlatParameters]:
    """Yield the storage of a unit.

    Trained, frozen and tied parameters, parameters that the optimizer needs whole, and parameters
    that are gathered in float8 are stored separately.
    """
    kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    for managed in group:
        parameter = managed.parameter
        placement = managed.placement
        alone = managed if placement.tied else None
        key = elements_of(parameter).dtype, placement.data_axes, parameter.requires_grad, alone
        kinds.setdefault((*key, parameter in rounded, managed.stays_whole), []).append(managed)
    for (_, axes, *_, whole), alike in kinds.items():
        parameters = [managed.parameter for managed in alike]
        reduction = reductions[axes]
        yield make(alike, *lay_out(parameters, reduction, whole=whole), reduction)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.numel() > 0 and (type(parameter) is nn.Parameter or is_packed(parameter))
