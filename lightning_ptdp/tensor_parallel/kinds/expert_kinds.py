"""Kind of the experts of a mixture, distributed over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.expert_parallel import inner_parts, inner_width, stores_as_usual
from lightning_ptdp.forward.own_forward import replace_forward
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_divides, shape_text
from lightning_ptdp.tensor_parallel.sharded_experts import ExpertsForward
from lightning_ptdp.tensor_parallel.tensor_shards import shard_columns, shard_twice

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

    def misfit(self, module: nn.Module) -> str | None:
        return None if self.fits(module) else f"that takes {self.takes}"

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
        placements = {
            name: self._placement(module, name, p.shape, place)
            for name, p in module.named_parameters()
        }
        return {
            name: replace(placement, sharded=placement.sharded[place.group.size == 1 :])
            for name, placement in placements.items()
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
        if inner is None:
            return placement
        dim, parts = inner
        return shard_twice(
            placement,
            shard_columns(
                shape, parts=parts, size=self.split_over, index=place.tensor.rank, dim=dim
            ),
        )

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

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text(shape, 0).replace("/t", "/e"), "experts: distributed"
