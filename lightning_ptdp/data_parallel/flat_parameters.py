"""Parameters that replicas gather together: views of a flat tensor, sharded over the replicas.

They have a state, and every transition is asserted::

    FULL --the optimizer's step, or free--> SHARDED --start_gather--> GATHERING --wait--> FULL
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_ptdp.data_parallel.absent_parameters import make_absent, make_available, set_access
from lightning_ptdp.data_parallel.reduction import PendingReduction, Reduction
from lightning_ptdp.parameters.managed_parameter import ManagedParameter
from lightning_ptdp.parameters.materialize import put_values
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.shims.quantization import elements_of, set_elements

_ALIGNMENT = 32  # elements; keeps every view on a 128-byte boundary for float32


LateValue = Callable[[ManagedParameter], Tensor | None]
"""Returns the initial value of a parameter on the meta device; None: it comes from elsewhere."""


class ParameterState(Enum):
    """State of the parameters that replicas gather together."""

    FULL = auto()
    """Every rank has the values of the last step."""
    SHARDED = auto()
    """Each rank has its own part. The other parts have old values or are freed."""
    GATHERING = auto()
    """An all-gather is in progress. Code that reads a parameter waits for it."""

    def to(self, state: ParameterState) -> ParameterState:
        """Return ``state``, which must be the next one."""
        following = self.value % len(ParameterState) + 1
        assert state.value == following, f"parameters go from {self.name} to {state.name}"
        return state


@dataclass(eq=False, kw_only=True)
class FlatParameters:
    """Parameters in one flat tensor.

    Attributes:
        parameters: The parameters.
        offsets: Offset of each.
        size: n, elements; some between parameters and at the end belong to none.
        reduction: Its inner group shares the tensor in equal parts.
        own: (n / parts,) this rank's part.
        full: (n,) all parts; None while they are freed.
        frees: Whether the other ranks' parts are freed between uses. Otherwise ``own`` is a view
            of ``full``.
        state: State of the parameters.
        settle: Waits until ``own`` has the values of the last step; None: it has them.
    """

    parameters: Sequence[ManagedParameter]
    offsets: Sequence[int]
    size: int
    reduction: Reduction
    own: Tensor
    full: Tensor | None
    frees: bool
    state: ParameterState = ParameterState.FULL
    settle: Callable[[], None] | None = None
    _pending: PendingReduction | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        parameters: Sequence[ManagedParameter],
        offsets: Sequence[int],
        size: int,
        reduction: Reduction,
        *,
        device: torch.device,
        frees: bool = False,
        late_value: LateValue | None = None,
    ) -> FlatParameters:
        """Move the values of ``parameters`` to a flat tensor; with ``frees``, free it.

        ``late_value`` returns those of parameters on the meta device, or None for zeros.
        """
        full = torch.zeros(size, dtype=elements_of(parameters[0].parameter).dtype, device=device)
        flat = cls(
            parameters=parameters,
            offsets=offsets,
            size=size,
            reduction=reduction,
            own=reduction.mine(full),
            full=full,
            frees=frees,
        )
        for managed, view in flat._views():
            values: Tensor | None = elements_of(managed.parameter)
            if managed.parameter.is_meta and late_value is not None:
                values = late_value(managed)
            if values is not None:
                view.copy_(values)
            if managed.parameter.is_meta:
                put_values(managed.parameter, view)
            set_elements(managed.parameter, view)
        if frees:
            flat.own = flat.own.clone()
            flat.free()
        else:
            for managed in parameters:
                set_access(managed.parameter, flat._arrive)
        return flat

    @cached_property
    def offset_of(self) -> Mapping[ManagedParameter, int]:
        """Return the offset of each parameter."""
        return dict(zip(self.parameters, self.offsets, strict=True))

    @cached_property
    def _freed(self) -> Tensor:
        """Return the element in the place of freed values: NaN, so that a leak is seen."""
        value = float("nan") if self.own.is_floating_point() else 0
        return self.own.new_full((), value)

    @property
    def begin(self) -> int:
        """Return the offset of ``own``."""
        return self.reduction.inner.rank * self.own.numel()

    def own_parts(self) -> Iterator[tuple[ManagedParameter, Placement, Tensor]]:
        """Yield each parameter in ``own`` with the placement and the values of its part."""
        stop = self.begin + self.own.numel()
        for managed, part, region in parts_of(
            self.parameters, self.offsets, self.begin, stop, first=self.reduction.counts
        ):
            yield managed, part, self.at(region).view(part.held_shape)

    def at(self, region: slice) -> Tensor:
        """Return the values in a range of the flat tensor, which ``own`` has."""
        return self.own[region.start - self.begin : region.stop - self.begin]

    def stepped(self, settle: Callable[[], None] | None = None) -> None:
        """Start to gather what the optimizer has changed, if all ranks keep it.

        With ``settle`` the optimizer is still changing it, and ``start_gather`` follows later.
        """
        self.settle = settle
        if self.frees:
            assert self.state is ParameterState.SHARDED, "the step's passes have freed the rest"
        else:
            self.state = self.state.to(ParameterState.SHARDED)
            if settle is None:
                self.start_gather()
            if any(type(managed.parameter) is not nn.Parameter for managed in self.parameters):
                self.wait()  # code may use what its class adds
                return
            for managed in self.parameters:
                make_absent(managed.parameter)

    def settled(self) -> None:
        """Return when ``own`` has the values of the last step."""
        settle = self.settle
        self.settle = None
        if settle is not None:
            settle()

    def _arrive(self, _: str | None) -> bool:
        """Return True when all parameters have their values; one of them is read."""
        self.wait()
        return True

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather the other ranks' parts, if they are missing; collective."""
        self.settled()
        if self.state is not ParameterState.SHARDED:
            return
        self.state = self.state.to(ParameterState.GATHERING)
        if self.full is None:
            self.full = self.own.new_empty(self.size)
            self.reduction.mine(self.full).copy_(self.own)
        self._pending = self.reduction.start_gather(self.full)

    def wait(self) -> None:
        """Return when all values are gathered; on CUDA, when the current stream waits for them."""
        self.start_gather()
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        try:
            pending.wait()
        finally:  # after an error, do not wait again
            for managed, view in self._views():
                make_available(managed.parameter, view if self.frees else None)
        self.state = self.state.to(ParameterState.FULL)

    @torch.no_grad()
    def free(self) -> None:
        """Free the other ranks' parts; a graph that has saved them keeps its own reference."""
        if self.state is ParameterState.GATHERING:
            self.wait()  # memory that a message is written to cannot be given away
        if self.full is not None and self.state is ParameterState.FULL:
            self.take_values()
            self.own.copy_(self.reduction.mine(self.full))  # the step may have written to it
            self.state = self.state.to(ParameterState.SHARDED)
            self.full = None
            for managed in self.parameters:
                make_absent(managed.parameter, self._freed)

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the values of parameters that the user's step has moved to other memory."""
        for managed, view in self._views() if self.state is ParameterState.FULL else ():
            elements = elements_of(managed.parameter)
            if elements.data_ptr() != view.data_ptr():
                set_elements(managed.parameter, view)
                elements_of(managed.parameter).copy_(elements)  # counts as a write

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the ranges of a flat tensor that belong to the parameters, in their shapes."""
        shapes = [managed.parameter.shape for managed in self.parameters]
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, shapes, strict=True)
        ]

    def _views(self) -> Iterator[tuple[ManagedParameter, Tensor]]:
        assert self.full is not None
        return zip(self.parameters, self.views(self.full), strict=True)


def aligned(size: int) -> int:
    """Return the next aligned offset after ``size`` elements."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def lay_out(
    parameters: Sequence[Tensor], reduction: Reduction, *, undivided: bool = False
) -> tuple[list[int], int]:
    """Return the offsets of parameters in a flat tensor, and its size.

    With ``undivided`` no rank's part cuts a parameter: the largest ones are placed first, each in
    the part that has least.
    """
    # Each parameter takes at least one element, so that every rank has a part.
    sizes = [aligned(max(parameter.numel(), 1)) for parameter in parameters]
    if undivided:
        parts = [0] * reduction.parts
        offset_of = dict[int, tuple[int, int]]()
        for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            part = parts.index(min(parts))
            offset_of[index] = part, parts[part]
            parts[part] += sizes[index]
        return [
            part * max(parts) + offset
            for part, offset in (offset_of[index] for index in range(len(parameters)))
        ], max(parts) * reduction.parts
    *offsets, total = accumulate(sizes, initial=0)
    multiple = _ALIGNMENT * reduction.parts
    return offsets, -(-total // multiple) * multiple


def parts_of(
    parameters: Sequence[ManagedParameter],
    offsets: Sequence[int],
    begin: int,
    stop: int,
    *,
    first: bool,
) -> Iterator[tuple[ManagedParameter, Placement, slice]]:
    """Yield the parameters within [begin, stop) of a flat tensor.

    Each comes with the placement of its part and the part's range in the flat tensor. ``first``
    tells whether this rank is the first that holds these parts.
    """
    for managed, offset in zip(parameters, offsets, strict=True):
        start = max(begin, offset)
        end = min(stop, offset + managed.parameter.numel())
        if start < end:
            part = (
                replace(managed.placement, first_in_block=first)
                if managed.is_undivided
                else managed.placement.flattened(start - offset, end - offset, first=first)
            )
            yield managed, part, slice(start, end)
