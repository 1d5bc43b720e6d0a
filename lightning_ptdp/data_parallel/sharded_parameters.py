"""Sharded parameters (ZeRO-3): gathered before a block uses them, one block ahead, and freed.

Between their uses each replica keeps 1/d of the parameters (arXiv 1910.02054, section 5.3). A unit
is what replicas gather together: the parameters of one block, or those of a stage outside of its
blocks. A rank holds the unit of the running block, the next one in the direction of the pass, and
those outside of the blocks::

    forward    block 0 | block 1 | block 2        backward   block 2 | block 1 | block 0
    gathers    1       | 2       |                gathers    1       | 0       |

The choice of gathered units affects only memory and time, not results: a read of a freed parameter
during a pass gathers its unit (``absent_parameters.py``). The autograd graph does not save weights.
It saves their positions, and the backward gathers the unit when it needs them. All replicas run the
same passes, and therefore gather in the same order.

Weights of products in float8 are gathered in float8. If other code
reads one in a pass, it may also write to it, so the unrounded values are gathered until the pass
ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.base.saved_tensors import checked
from lightning_ptdp.blocks.fp8 import RoundedWeight
from lightning_ptdp.data_parallel.absent_parameters import set_access
from lightning_ptdp.data_parallel.flat_parameters import (
    FlatParameters,
    LateValue,
    ParameterState,
)
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.data_parallel.sharded_units import (
    Gathered,
    RoundedParameters,
    Unit,
    agree_on_scales,
    lay_out_unit,
    make_units,
)
from lightning_ptdp.forward.own_forward import OwnForward, replace_forward
from lightning_ptdp.forward.surroundings import Forward, Surrounding
from lightning_ptdp.parameters.managed_parameter import ManagedParameter, ManagedParameters
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.shims.quantization import PackedProduct, elements_of, is_packed, release

Direction = Literal[-1, 0, 1]
_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a saved tensor in the flat tensor."""


class ShardedParameters(Surrounding):
    """Sharded parameters of one rank.

    Args:
        module: This rank's part of the LightningModule.
        parameters: Its parameters.
        blocks: Dotted names of the repeated containers; found if None.
        reductions: For each tuple of data axes, the replicas over which parameters are sharded.
        device: Device of the parameters.
        late_value: Returns the values of parameters on the meta device.
        by_block: Free each block as soon as another needs its parameters. Otherwise ``free`` does.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: ManagedParameters,
        *,
        blocks: Blocks | None,
        reductions: Mapping[tuple[str, ...], Reduction],
        device: torch.device,
        late_value: LateValue | None,
        by_block: bool = True,
    ) -> None:
        self._by_block = by_block
        self._module = module
        make = partial(FlatParameters.of, device=device, frees=True, late_value=late_value)
        self._rounded: dict[nn.Parameter, RoundedWeight] = {}
        self._scaled = False
        self._lay_out = partial(
            lay_out_unit, reductions=reductions, make=make, rounded=self._rounded
        )
        self._units = list(make_units(module, parameters, blocks, reductions, self._lay_out))
        self._direction: Direction = 0
        self._current: tuple[Unit, Direction] | None = None
        self._saved: dict[int, tuple[Unit, Gathered]] = {}
        for unit in self._units:
            self._hold(unit)

    @property
    def flats(self) -> list[FlatParameters]:
        """Return the storage of the parameters that are sharded."""
        return [flat for unit in self._units for flat in unit.flats]

    def _hold(self, unit: Unit) -> None:
        for flat in unit.flats:
            for managed in flat.parameters:
                if is_packed(managed.parameter):
                    layer = self._module.get_submodule(managed.name.rpartition(".")[0])
                    release(layer)
                    replace_forward(layer, PackedForward)
                managed.hold(None)
                set_access(managed.parameter, partial(self._access, unit, flat, managed.name))
                if managed.parameter in self._rounded:
                    fetch = partial(self._fetch, unit, managed.name)
                    self._rounded[managed.parameter].fetch = fetch
            for managed, part, values in flat.own_parts():
                managed.hold(values, part)
        unit.gathered = unit.usual = [
            RoundedParameters(flat, self._rounded)
            if flat.parameters[0].parameter in self._rounded
            else flat
            for flat in unit.flats
        ]

    def keep_undivided(self) -> None:
        """Give each parameter that the optimizer needs unsharded to one rank; collective."""
        self._lay_out_again(lambda managed: managed.is_undivided)

    def gather_rounded(self, weights: Mapping[nn.Parameter, RoundedWeight]) -> None:
        """Gather these weights in float8, because products in float8 read them; collective.

        Of weights that are not sharded, products round the weight itself.
        """
        self._rounded.update(weights)
        self._lay_out_again(lambda managed: managed.parameter in weights)
        sharded = {managed.parameter for flat in self.flats for managed in flat.parameters}
        for parameter, rounded in weights.items():
            rounded.used = parameter in sharded

    def _lay_out_again(self, moves: Callable[[ManagedParameter], bool]) -> None:
        for unit in self._units:
            members = [managed for flat in unit.flats for managed in flat.parameters]
            if any(map(moves, members)):
                for flat in unit.flats:
                    flat.wait()
                unit.flats = [*self._lay_out(members)]
                self._hold(unit)

    def __deepcopy__(self, memo: object) -> ShardedParameters:
        """Return self: a copy of a module gathers from the same storage."""
        return self

    def put_on_blocks(self) -> None:
        """Let the blocks gather their parameters, in place."""
        for unit in self._units:
            if unit.block is not None:
                replace_forward(unit.block, GatheredForward, enter=partial(self.need, unit))

    # ---- passes ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, forward: Forward) -> Iterator[None]:
        """Gather during a forward, ahead of its blocks."""
        self._agree_on_scales()
        outer = self._direction
        self._direction = 1
        blocks = [u for u in self._of(forward.stage) if u.block is not None]
        skipped = blocks[1:] if self._by_block else []
        for unit in self._of(forward.stage):
            if unit not in skipped:
                unit.start()
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda unpack: unpack())
            if forward.training
            else contextlib.nullcontext()
        )
        try:
            with hooks:
                yield
        finally:
            self._direction = outer

    @contextlib.contextmanager
    def computing(self, direction: Direction = -1) -> Iterator[None]:
        """Gather what is read inside the context, a backward unless a forward runs; then free."""
        self._agree_on_scales()
        outer = self._direction
        self._direction = direction
        try:
            yield
        finally:
            self._direction = outer
        for unit in self._units:
            self._free(unit)
            if unit.gathered is not unit.usual:
                unit.gathered = unit.usual
                for gathered in self._rounded_in(unit):
                    self._release(gathered)
                    gathered.use(True)
        self._current = None
        self._scaled = False

    def _agree_on_scales(self) -> None:
        """Agree on the scales of weights in float8, once between two changes of the weights."""
        if not self._scaled:
            agree_on_scales([some for unit in self._units for some in self._rounded_in(unit)])
        self._scaled = True

    @staticmethod
    def _rounded_in(unit: Unit) -> list[RoundedParameters]:
        return [some for some in unit.gathered if isinstance(some, RoundedParameters)]

    def need(self, unit: Unit) -> None:
        """Return when the parameters of ``unit`` are gathered; gather the next block's meanwhile."""
        if self._current == (unit, self._direction):
            return
        for gathered in unit.gathered:
            self._wait(unit, gathered)
        if unit.block is None or not self._by_block:
            return
        self._current = unit, self._direction
        ahead = unit.after if self._direction > 0 else unit.before
        for other in self._units:
            if other.block is not None and other is not unit and other is not ahead:
                self._free(other)
        if ahead is not None:
            ahead.start()

    def gather(self, stage: int) -> None:
        """Start to gather the parameters that ``stage`` uses."""
        for unit in self._of(stage):
            unit.start()

    def free(self, stage: int) -> None:
        """Free the other ranks' parts of the parameters that only ``stage`` uses."""
        for unit in self._of(stage):
            if unit.chunk is not None:
                self._free(unit)

    def _of(self, stage: int) -> list[Unit]:
        return [unit for unit in self._units if unit.chunk in (stage, None)]

    def _free(self, unit: Unit) -> None:
        for gathered in unit.gathered:
            self._release(gathered)

    def _release(self, gathered: Gathered) -> None:
        if gathered.state is ParameterState.FULL:
            self._saved.pop(_address(gathered), None)
        gathered.free()

    def _wait(self, unit: Unit, gathered: Gathered) -> None:
        gathered.wait()
        self._saved[_address(gathered)] = unit, gathered

    def _fetch(self, unit: Unit, name: str) -> None:
        """Gather what a product in float8 with the parameter ``name`` reads."""
        self._check_runs(name, "a product in float8")
        self.need(unit)

    def _access(self, unit: Unit, flat: FlatParameters, name: str, function: str | None) -> bool:
        """Gather the parameter ``name``, which ``function`` reads; see ``Access``."""
        if not self._check_runs(name, function):
            return False
        for rounded in self._rounded_in(unit):
            if rounded.flat is flat:
                self._release(rounded)
                rounded.use(False)
                unit.gathered = [flat if some is rounded else some for some in unit.gathered]
        self.need(unit)
        self._wait(unit, flat)
        return True

    def _check_runs(self, name: str, function: str | None) -> bool:
        """Return True if a pass runs, and False if not and ``function`` is None.

        Raises:
            PartialModelError: No pass runs, so other ranks may not read the parameter now.
        """
        if self._direction == 0:
            if function is None:
                return False
            hook = getattr(self._module, "_current_fx_name", None)
            raise PartialModelError(
                f"{hook or 'code outside of the steps'} reads the values of '{name}' ({function}), "
                "but between the passes each rank has only its part of them (shard='parameters'). "
                "Read them in the step, call trainer.strategy.gather_state_dict() on all ranks, or "
                "use shard='gradients'"
            )
        return True

    # ---- tensors that a graph saves --------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the tensor and keeps only the position of a weight."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return checked(tensor)
        entry = self._saved.get(tensor.untyped_storage().data_ptr())
        if entry is None or tensor.dtype != _full(entry[1]).dtype:
            return checked(tensor)
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return partial(self._unpacked, *entry, place)

    def _unpacked(self, unit: Unit, gathered: Gathered, place: _Place) -> Tensor:
        if gathered.state is not ParameterState.FULL or unit.block is not None:
            self.need(unit)
        self._wait(unit, gathered)
        return _full(gathered).as_strided(*place)


def _full(gathered: Gathered) -> Tensor:
    assert gathered.full is not None
    return gathered.full


def _address(gathered: Gathered) -> int:
    return _full(gathered).untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredForward(OwnForward):
    """Forward of a block that waits for its parameters.

    Attributes:
        enter: Waits for them.
    """

    enter: Callable[[], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward."""
        self.enter()
        return self.original(*args, **kwargs)


class PackedForward(OwnForward):
    """Forward of a layer with a packed weight, whose graph lets the elements be freed."""

    def __call__(self, x: Tensor) -> Any:
        """Run the layer's forward."""
        layer: Any = self.module
        elements = elements_of(layer.weight).as_subclass(Tensor)
        return PackedProduct.apply(x, elements, layer.bias, layer, self.original)
