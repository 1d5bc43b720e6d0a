"""Kinds: the ways in which a module can be sharded, one class for each."""

from torch import nn

from lightning_ptdp.tensor_parallel.kinds.kind import SPLIT_AXES, Kind, ModulePlace, check_divides
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import Column, Row
from lightning_ptdp.tensor_parallel.kinds.replicated import Alias, Partial, Region, Whole
from lightning_ptdp.tensor_parallel.kinds.sharded_attention import AttentionHeads
from lightning_ptdp.tensor_parallel.kinds.sharded_experts import Experts
from lightning_ptdp.tensor_parallel.kinds.vocabulary import Position, Vocabulary

__all__ = [
    "KINDS",
    "SPLIT_AXES",
    "Alias",
    "AttentionHeads",
    "Column",
    "Experts",
    "Kind",
    "ModulePlace",
    "Partial",
    "Position",
    "Region",
    "Row",
    "Vocabulary",
    "Whole",
    "check_divides",
    "fits",
    "kind_from",
]

KINDS: tuple[type[Kind], ...] = (
    Column,
    Row,
    Vocabulary,
    Position,
    Partial,
    AttentionHeads,
    Alias,
    Region,
    Whole,
    Experts,
)
"""The kinds that a plan may refer to by name."""


def kind_from(value: str | Kind, *, pattern: str) -> Kind:
    """Return the kind that a plan's ``value`` names.

    Raises:
        ValueError: There is no such kind.
    """
    if isinstance(value, Kind):
        return value
    for kind in KINDS:
        if value == kind.name:
            return kind()
    names = ", ".join(f"'{kind.name}'" for kind in KINDS)
    raise ValueError(
        f"tensor[{pattern!r}]={value!r} is not a kind of tensor parallelism. Use {names}, or "
        "Column(parts=(...))"
    )


def fits(module: nn.Module, kind: Kind) -> bool:
    """Return True if the module's type can be sharded in this way."""
    return kind.misfit(module) is None
