"""Split by heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.sharding import Sharding
from lightning_ptdp.tensor_parallel.attention import ParallelMultiheadAttention, why_not
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, Place, check_divides, shape_text
from lightning_ptdp.tensor_parallel.kinds.linear import Row
from lightning_ptdp.tensor_parallel.linear import RowParallelLinear

__all__ = ["Attention"]


@dataclass(frozen=True, kw_only=True)
class Attention(Kind):
    """``nn.MultiheadAttention`` with its heads split; its projections are a column and a row layer."""

    name = "attention"
    takes = "nn.MultiheadAttention"
    parameters = None

    def fits(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    def check(self, name: str, module: nn.Module, size: int) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        check_divides(name, "num_heads", module.num_heads, size)
        if (reason := why_not(module)) is not None:
            raise ValueError(f"'{name}': {reason}, and its heads cannot be split; leave it out of the plan")

    def check_sequence(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            raise ValueError(f"'{name}': sequence_parallel=True needs an nn.MultiheadAttention with batch_first=True")

    def shardings(self, module: nn.Module, place: Place) -> dict[str, Sharding]:
        found = super().shardings(module, place)
        shapes = {name: sharding.full_shape for name, sharding in found.items()}
        found["out_proj.weight"] = place.columns(shapes["out_proj.weight"], shapes["out_proj.weight"][1:], dim=1)
        for name in shapes.keys() & {"in_proj_weight", "in_proj_bias"}:
            found[name] = place.columns(shapes[name], (shapes[name][0] // 3,) * 3)
        return found

    def build(self, module: nn.Module, local: Mapping[str, nn.Parameter], place: Place) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention)
        group, split = place.group, place.sequence_parallel
        out = RowParallelLinear(local["out_proj.weight"], local.get("out_proj.bias"), group=group, sequence_parallel=split)
        return ParallelMultiheadAttention(
            local["in_proj_weight"], local.get("in_proj_bias"), out, whole=module, group=group, sequence_parallel=split
        )

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        return shape_text(shape, 0), "column: q, k and v each split by heads"

    def of_child(self, name: str) -> Kind | None:
        return Row() if name == "out_proj" else None
