"""Units of sharded parameters, which replicas gather together, and their storage.

A unit holds the parameters of one block, or those of a stage outside of its blocks.

Weights that only float8 products read are gathered in float8. Each replica rounds its own part and
sends one byte per element. All use the scale of the full weight, so the gathered values are those
to which one process rounds it. torchao and FSDP2 gather in the same way
(``enable_fsdp_float8_all_gather``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.blocks.fp8 import RoundedWeight
from lightning_ptdp.blocks.local_blocks import local_blocks
from lightning_ptdp.data_parallel.flat_parameters import (
    FlatParameters,
    ParameterState,
    lay_out,
    parts_of,
)
from lightning_ptdp.data_parallel.gradient_sums import flattened
from lightning_ptdp.data_parallel.reduction import PendingReduction, Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.shims.quantization import elements_of, is_packed, rounded_weight, weight_scale


class RoundedParameters:
    """The parameters of a flat tensor in float8.

    Args:
        flat: The parameters.
        weights: Receive the gathered values.

    Attributes:
        flat: The parameters.
        full: (n,) float8; None while it is freed.
        state: State of the values.
    """

    def __init__(self, flat: FlatParameters, weights: Mapping[nn.Parameter, RoundedWeight]) -> None:
        self.flat = flat
        self.full: Tensor | None = None
        self.state = ParameterState.SHARDED
        self._weights = {managed: weights[managed.parameter] for managed in flat.parameters}
        self._recipe = self._weights[flat.parameters[0]].recipe
        self._pending: PendingReduction | None = None

    @torch.no_grad()
    def largest(self) -> Tensor:
        """Return the largest magnitude in this rank's part of each parameter, (k) float32."""
        self.flat.settled()
        zero = self.flat.own.new_zeros(())
        found = {managed: values.abs().amax() for managed, _, values in self.flat.own_parts()}
        return torch.stack([found.get(managed, zero) for managed in self._weights]).float()

    def rescale(self, largest: Tensor) -> None:
        """Round from now on with the scales for these largest magnitudes of full parameters."""
        scales = weight_scale(largest, self._recipe)
        for weight, scale in zip(self._weights.values(), scales.unbind(), strict=True):
            weight.scale = scale

    def use(self, used: bool) -> None:
        """Let products use these values, or round the weights themselves."""
        for weight in self._weights.values():
            weight.used = used

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather the values, if they are missing; collective."""
        if self.state is not ParameterState.SHARDED:
            return
        self.state = self.state.to(ParameterState.GATHERING)
        flat = self.flat
        flat.settled()
        self.full = torch.empty(flat.size, dtype=torch.uint8, device=flat.own.device)
        mine = flat.reduction.mine(self.full)
        stop = flat.begin + flat.own.numel()
        for managed, _, region in parts_of(
            flat.parameters, flat.offsets, flat.begin, stop, first=False
        ):
            scale = self._weights[managed].scale
            assert scale is not None
            rounded = rounded_weight(flat.at(region), scale, self._recipe)
            mine[region.start - flat.begin : region.stop - flat.begin] = rounded.view(torch.uint8)
        self._pending = flat.reduction.start_gather(self.full)

    def wait(self) -> None:
        """Return when all values are gathered; on CUDA, when the current stream waits for them."""
        self.start_gather()
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        pending.wait()
        assert self.full is not None
        self.full = self.full.view(self._recipe.config.cast_config_weight.target_dtype)
        views = self.flat.views(self.full)
        for weight, view in zip(self._weights.values(), views, strict=True):
            weight.values = view
        self.state = self.state.to(ParameterState.FULL)

    def free(self) -> None:
        """Free the values; a graph that has saved them keeps its own reference."""
        if self.state is ParameterState.GATHERING:
            self.wait()  # memory that a message is written to cannot be given away
        if self.state is ParameterState.FULL:
            self.state = self.state.to(ParameterState.SHARDED)
            self.full = None
            for weight in self._weights.values():
                weight.values = None


def agree_on_scales(rounded: Sequence[RoundedParameters]) -> None:
    """Scale parameters by their largest magnitudes over the replicas; collective.

    There is one reduction for all parameters that the same ranks share.
    """
    shared: dict[tuple[int, ...], list[RoundedParameters]] = {}
    for parameters in rounded:
        shared.setdefault(parameters.flat.reduction.inner.ranks, []).append(parameters)
    for members in shared.values():
        group = members[0].flat.reduction.inner
        flat, largest = flattened([parameters.largest() for parameters in members])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group.handle)
        for parameters, maxima in zip(members, largest, strict=True):
            parameters.rescale(maxima)


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
        kinds.setdefault((*key, parameter in rounded, managed.is_undivided), []).append(managed)
    for (_, axes, *_, undivided), members in kinds.items():
        parameters = [managed.parameter for managed in members]
        reduction = reductions[axes]
        yield make(members, *lay_out(parameters, reduction, undivided=undivided), reduction)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.numel() > 0 and (type(parameter) is nn.Parameter or is_packed(parameter))
