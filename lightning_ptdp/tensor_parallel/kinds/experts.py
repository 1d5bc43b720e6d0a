"""The experts of a mixture, which are shared out whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.own_forward import replace_forward
from lightning_ptdp.sharding import Sharding
from lightning_ptdp.tensor_parallel.experts import ExpertsForward
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, Place, check_divides, shape_text
from lightning_ptdp.tensor_parallel.sharding import shard_columns

__all__ = ["Experts"]

_ARGUMENTS = 3
_COUNT = "num_experts"


@dataclass(frozen=True, kw_only=True)
class Experts(Kind):
    """A module with all experts of a layer, ``forward(tokens, indices, weights)`` of shapes (n, h), (n, k), (n, k), whose parameters list
    the experts along their first dimension, and which has their number as ``num_experts``, as Hugging Face's mixtures have."""

    name = "experts"
    axis = "expert"
    takes = "a module with num_experts, whose parameters list the experts first, and forward(tokens, indices, weights)"
    parameters = None

    def fits(self, module: nn.Module) -> bool:
        number = getattr(module, _COUNT, None)
        first = {parameter.size(0) if parameter.dim() else 0 for parameter in module.parameters()}
        given = inspect.signature(type(module).forward).parameters.values()
        positional = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return isinstance(number, int) and first == {number} and len(positional) == 1 + _ARGUMENTS

    def misfit(self, module: nn.Module) -> str | None:
        return None if self.fits(module) else f"that takes {self.takes}"

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_divides(name, "number of experts", getattr(module, _COUNT), size, axis="expert")

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        partial = ("tensor",) if place.tensor.size > 1 else ()
        return {
            name: shard_columns(
                p.shape, parts=p.shape[:1], size=place.group.size, index=place.group.rank, axis="expert", partial=partial
            )
            for name, p in module.named_parameters()
        }

    def build(self, module: nn.Module, local: Mapping[str, nn.Parameter], place: Place) -> nn.Module:
        number = getattr(module, _COUNT)
        setattr(module, _COUNT, number // place.group.size)
        replace_forward(module, ExpertsForward, name=place.name, num_experts=number, group=place.group, tensor=place.tensor)
        return super().build(module, local, place)

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text(shape, 0).replace("/t", "/e"), "experts: shared out"
