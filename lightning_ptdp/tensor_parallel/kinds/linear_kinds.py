"""Kinds of linear layers: column and row.

``nn.Linear`` stores its weight as (out, in). The ``Conv1D`` of Hugging Face's GPT-2 stores it as
(in, out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.kinds.kind import (
    Kind,
    ModulePlace,
    check_divides,
    check_embedding,
    shape_text,
)
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True, kw_only=True)
class Column(Kind):
    """A linear layer split by output features.

    It may be an ``nn.Linear``, a ``Conv1D``, or an ``nn.Embedding`` with features for each head.

    Attributes:
        parts: Output sizes of the parts of a fused layer, e.g. (q, k, v), each split on its own;
            None: one part.
        heads: Number of attention heads in each part, which must not be cut. None: any number of
            features may be a rank's share.
        copy_heads: Parts with fewer heads than there are ranks (grouped and multi-query attention,
            arXiv 2305.13245, 1911.02150) give every rank one head. Ranks whose queries share a head
            hold the same one.
    """

    parts: tuple[Size, ...] | None = None
    heads: tuple[Size, ...] | Size | None = None
    copy_heads: bool = False

    name = "column"
    takes = "nn.Linear (or the Conv1D of transformers)"
    region_part = True

    def __post_init__(self) -> None:
        check_types(self)
        if self.parts == ():
            raise ValueError(
                "Column(parts=()) has no parts. Give the output sizes of all parts, such as "
                "(768, 768, 768), or None for one part"
            )
        if self.heads is not None:
            heads = (self.heads,) if isinstance(self.heads, int) else self.heads
            object.__setattr__(self, "heads", heads)
            if len(heads) != len(self.parts or (0,)):
                raise ValueError(
                    f"Column(parts={self.parts}, heads={self.heads}) must have one number of "
                    "heads for each part"
                )

    def __repr__(self) -> str:
        heads = f", heads={self.heads}" if self.heads is not None else ""
        return f"Column(parts={self.parts}{heads}{', copy_heads=True' if self.copy_heads else ''})"

    def fits(self, module: nn.Module) -> bool:
        return is_linear(module) or isinstance(module, nn.Embedding)

    def check(self, name: str, module: nn.Module, size: int) -> None:
        out_features, _ = output_input_sizes(module)
        parts = self._part_sizes(out_features)
        if sum(parts) != out_features:
            raise ValueError(
                f"'{name}': parts={parts} sum to {sum(parts)}, but "
                f"out_features={out_features}. List the sizes of all parts"
            )
        heads = self.heads if isinstance(self.heads, tuple) else (None,) * len(parts)
        for index, (part, count) in enumerate(zip(parts, heads, strict=True)):
            label = f"parts[{index}]" if self.parts is not None else "out_features"
            if count is None:
                check_divides(name, label, part, size)
            elif part % count:
                raise ValueError(
                    f"'{name}': {label}={part} is not divisible by its number of heads, {count}"
                )
            elif not (self.copy_heads and size % count == 0):
                check_divides(name, "number of heads", count, size)
        check_embedding(name, module, size)

    def copies(self, size: int) -> tuple[int, ...]:
        if not self.copy_heads or not isinstance(self.heads, tuple):
            return (1,) * len(self.parts or (0,))
        return tuple(max(1, size // count) for count in self.heads)

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        placements = {}
        for name, parameter in module.named_parameters():
            dim = parameter.dim() - 1 if stores_outputs_last(module) else 0
            parts = self._part_sizes(parameter.shape[dim])
            placements[name] = place.columns(
                parameter.shape, parts, copies=self.copies(place.group.size), dim=dim
            )
        return placements

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        weight = local["weight"]
        if isinstance(module, nn.Embedding):
            # A look-up needs no communication: ids have no gradient to sum, and the output stays
            # split.
            new = nn.Embedding(weight.size(0), weight.size(1), module.padding_idx, device="meta")
            new.weight = weight
            return new
        return ColumnParallelLinear(
            weight,
            local.get("bias"),
            parts=self._part_sizes(output_input_sizes(module)[0]),
            transposed=is_conv1d(module),
            enters=place.enters,
            **place.layer_options,
        )

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        description = "column: split by output features"
        if self.parts is not None and len(self.parts) > 1:
            description += f", {len(self.parts)} parts, each separately"
        if isinstance(self.heads, tuple):
            description += f", whole heads ({', '.join(map(str, self.heads))})"
        if self.copy_heads:
            description += ", at least one"
        return shape_text(shape, len(shape) - 1 if outputs_last else 0), description

    def _part_sizes(self, out_features: int) -> tuple[int, ...]:
        return self.parts if self.parts is not None else (out_features,)


@dataclass(frozen=True, kw_only=True)
class Row(Kind):
    """``nn.Linear`` (or ``Conv1D``) split by input features, after column layers."""

    name = "row"
    takes = "nn.Linear (or the Conv1D of transformers)"
    region_part = True

    def fits(self, module: nn.Module) -> bool:
        return is_linear(module)

    def check(self, name: str, module: nn.Module, size: int) -> None:
        check_divides(name, "in_features", output_input_sizes(module)[1], size)

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        shape = module.get_parameter("weight").shape
        dim = 0 if is_conv1d(module) else 1
        return super().placements(module, place) | {
            "weight": place.columns(shape, (shape[dim],), dim=dim)
        }

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        return RowParallelLinear(
            local["weight"],
            local.get("bias"),
            transposed=is_conv1d(module),
            **place.layer_options,
        )

    def describe(self, key: str, shape: Sequence[int], *, outputs_last: bool) -> tuple[str, str]:
        if key != "weight":
            description = "row: whole, added once; gradient partial under sequence parallelism"
            return shape_text(shape), description
        return shape_text(shape, 0 if outputs_last else 1), "row: split by input features"


def is_conv1d(module: nn.Module) -> bool:
    """Return True if the module is a ``transformers.pytorch_utils.Conv1D``.

    The class is recognized by name, so that transformers need not be imported.
    """
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Return True if the module multiplies by a weight."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def stores_outputs_last(module: nn.Module) -> bool:
    """Return True if the output features are the last dimension of the weight.

    This holds for ``Conv1D`` and ``nn.Embedding``.
    """
    return is_conv1d(module) or isinstance(module, nn.Embedding)


def output_input_sizes(module: nn.Module) -> tuple[int, int]:
    """Return (output features, input features)."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if stores_outputs_last(module) else (rows, columns)
