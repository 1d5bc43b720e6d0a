"""Forward of an experts module whose experts are distributed over ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.expert_parallel import (
    Dispatched,
    HostNumbers,
    dispatch,
    inner_parts,
    inner_width,
    stores_as_usual,
    usual_output,
)
from lightning_ptdp.forward.matrix_product import autocast_dtype
from lightning_ptdp.forward.own_forward import OwnForward, replace_forward, replacements
from lightning_ptdp.forward.surroundings import Contexts, Forward, Surrounding
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.collectives import copy, join_sequence, reduce, split_sequence
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_divides
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns, shard_twice
from lightning_ptdp.world.mesh import Group

_GROUPED = "grouped_mm"
"""The default one of transformers' implementations of experts."""


class ReusedHostReads(Surrounding):
    """Surrounding that lets a recomputation reuse the numbers that its forward read."""

    def __init__(self) -> None:
        self._numbers: list[HostNumbers] = []

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Find the experts of this rank."""
        self._numbers = [found.numbers for found in replacements(module, ExpertsForward)]
        return super().attach(module)

    def recomputation(self, forward: Forward) -> Contexts | None:
        """Keep the numbers in the forward, and use them in the recomputation."""
        kept: list[list[list[int]]] = [[] for _ in self._numbers]
        return self._with(kept=kept), self._with(known=kept)

    @contextlib.contextmanager
    def _with(self, **readings: Sequence[list[list[int]]]) -> Iterator[None]:
        for name, lists in readings.items():
            for numbers, values in zip(self._numbers, lists, strict=True):
                setattr(numbers, name, values)
        try:
            yield
        finally:
            for numbers in self._numbers:
                numbers.kept = numbers.known = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertsForward(OwnForward):
    """Replacement for ``forward(x_nh, index_nk, weights_nk)`` of an experts module.

    Tokens of all ranks are sent to the ranks that hold their experts. The module's own forward gets
    the received rows, with one expert and the weight 1 for each. The weights are applied on the
    tokens' own rank.

    Ranks of a tensor group hold the same tokens. Each rank sends a part of them. If each rank holds
    a part of every expert, each sends all tokens instead, and the partial results are summed.

    Attributes:
        name: Name of the module.
        num_experts: E.
        group: The ranks over which the experts are distributed.
        tensor: The tensor group.
        splits_experts: True if each tensor-parallel rank holds a part of every expert.
        numbers: Reads the sizes of what is sent.
    """

    name: str
    num_experts: int
    group: Group
    tensor: Group = field(default_factory=Group)
    splits_experts: bool = False
    numbers: HostNumbers = field(default_factory=HostNumbers)

    def __call__(
        self,
        x_nh: Tensor,
        index_nk: Tensor,
        weights_nk: Tensor,
        *args: Any,
        kept_nk: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shape = x_nh.shape
        x_nh = x_nh.reshape(-1, shape[-1])
        index_nk, weights_nk = (x.reshape(x_nh.size(0), -1) for x in (index_nk, weights_nk))
        if self.splits_experts:
            local = [copy(x_nh, self.tensor), index_nk, copy(weights_nk, self.tensor)]
        else:
            local = [self._own(x) for x in (x_nh, index_nk, weights_nk)]
            kept_nk = kept_nk if kept_nk is None else self._own(kept_nk)
        routed = dispatch(
            *local,
            num_experts=self.num_experts,
            group=self.group,
            router=lambda: f"'{self.name}' on rank {self.group.ranks[self.group.rank]}",
            numbers=self.numbers,
            kept_nk=kept_nk,
        )
        y_nh = routed.combine(self._experts(routed), local[2])
        y_nh = (
            reduce(y_nh, self.tensor)
            if self.splits_experts
            else join_sequence(y_nh, self.tensor, 0)[: x_nh.size(0)]
        )
        return y_nh.view(shape)

    def _experts(self, routed: Dispatched) -> Tensor:
        rows = routed.rows_rh
        backend = getattr(getattr(self.module, "config", None), "_experts_implementation", None)
        if self.splits_experts or (backend in (None, _GROUPED) and stores_as_usual(self.module)):
            # transformers' grouped products are computed in the weights' dtype, even under
            # autocast.
            dtype = autocast_dtype(rows) if backend is None else None
            adds_bias = not self.splits_experts or self.tensor.rank == 0
            return usual_output(self.module, routed, adds_bias=adds_bias, dtype=dtype)
        if not rows.size(0):
            # No rows were received. The backward must still run the collectives with the other
            # ranks.
            return rows + sum(
                parameter[:0].sum() for _, parameter in nn.Module.named_parameters(self.module)
            )
        ones = rows.new_ones(rows.size(0), 1)
        return self.original(rows, routed.experts_r[:, None], ones)

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's part of the tokens, padded to a multiple of the group's size."""
        if self.tensor.size == 1:
            return x
        padding = x.new_zeros(-x.size(0) % self.tensor.size, *x.shape[1:])
        return split_sequence(torch.cat([x, padding]), self.tensor, 0)


_ARGUMENTS = 3
_COUNT = "num_experts"


@dataclass(frozen=True, kw_only=True)
class Experts(Kind):
    """A module that holds all experts of a layer.

    Its forward is ``forward(tokens, indices, weights)`` of shapes (n, h), (n, k), (n, k). Its
    parameters list the experts along their first dimension. It stores their number as
    ``num_experts``, like Hugging Face's mixtures.

    Attributes:
        split_over: Number of tensor-parallel ranks over which each expert's inner width is also
            split; taken from the layout.
    """

    split_over: Size = field(default=1, repr=False)

    name = "experts"
    axis = "expert"
    takes = (
        "a module with num_experts, whose parameters list the experts first, and forward(tokens, "
        "indices, weights)"
    )
    parameters = None
    sharding = "experts: distributed"
    split_dim = 0

    def __post_init__(self) -> None:
        check_types(self)

    def at(self, degrees: Mapping[str, int]) -> Kind | None:
        split_over = degrees["expert_tensor"]
        if max(degrees["expert"], split_over) > 1:
            return replace(self, split_over=split_over)
        return None

    def fits(self, module: nn.Module) -> bool:
        number = getattr(module, _COUNT, None)
        if not isinstance(number, int) or {
            p.size(0) if p.dim() else 0 for p in module.parameters()
        } != {number}:
            return False
        # a scripted module's forward has none
        args = inspect.signature(type(module).forward).parameters.values()
        return (
            sum(arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD) for arg in args)
            == 1 + _ARGUMENTS
        )

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_divides(name, "number of experts", getattr(module, _COUNT), size, axis="expert")
        if self.split_over == 1:
            return
        if not stores_as_usual(module):
            raise ValueError(
                f"'{name}': expert_tensor_parallel_size={self.split_over} needs the attributes "
                "that describe transformers' experts (gate_up_proj, down_proj, is_transposed, "
                "is_concatenated, has_gate, has_bias, _apply_gate), which "
                f"{type(module).__name__} does not have. Use expert_tensor_parallel_size=1"
            )
        check_divides(
            name,
            "inner width of an expert",
            inner_width(module),
            self.split_over,
            axis="expert_tensor",
        )

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        return {
            name: self._placement(module, name, p.shape, place)
            for name, p in module.named_parameters()
        }

    def _placement(
        self, module: nn.Module, name: str, shape: Sequence[int], place: ModulePlace
    ) -> Placement:
        inner = inner_parts(module, name) if self.split_over > 1 else None
        # Without an inner dimension each tensor-parallel rank has one term of the gradient: that of
        # its tokens, or that of the only rank that adds a bias.
        partial = ("tensor",) if place.tensor.size > 1 and inner is None else ()
        placement = shard_columns(
            shape,
            parts=shape[:1],
            size=place.group.size,
            index=place.group.rank,
            axis="expert",
            partial=partial,
        )
        if inner is not None:
            dim, parts = inner
            columns = shard_columns(
                shape, parts=parts, size=self.split_over, index=place.tensor.rank, dim=dim
            )
            placement = shard_twice(placement, columns)
        if place.group.size == 1:
            _expert, *sharded = placement.sharded
            return replace(placement, sharded=tuple(sharded))
        return placement

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        number = getattr(module, _COUNT)
        setattr(module, _COUNT, number // place.group.size)
        replace_forward(
            module,
            ExpertsForward,
            name=place.name,
            num_experts=number,
            group=place.group,
            tensor=place.tensor,
            splits_experts=self.split_over > 1,
        )
        return super().build(module, local, place)
