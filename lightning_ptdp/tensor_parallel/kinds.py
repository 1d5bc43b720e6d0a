"""The ways in which a module can be spread over the tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

__all__ = ["Column", "Kind", "Partial", "Position", "Row", "Vocabulary", "kind_from", "module_types"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """``nn.Linear`` split by output features.

    Attributes:
        parts: Output sizes of the parts of a fused layer, e.g. (q, k, v), each split on its own; None: one part.
    """

    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.parts is not None:
            parts = tuple(self.parts) if isinstance(self.parts, Sequence) and not isinstance(self.parts, str) else ()
            if not parts or not all(isinstance(part, int) and part > 0 for part in parts):
                raise ValueError(f"Column(parts={self.parts!r}): parts must be positive output sizes, like (768, 768, 768)")
            object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``nn.Linear`` split by input features; its input comes from column layers."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """``nn.Embedding`` or the ``nn.Linear`` of the output head, split by token; padded where the vocabulary does not divide."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """``nn.Embedding`` of positions: kept whole; under sequence parallelism looked up for the own slice of the sequence."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """A module that is kept whole but sees only this rank's heads or features, like the norm of queries and keys between column
    and row layers: its parameters' gradients are parts of a sum over the group, with and without sequence parallelism."""


Kind: TypeAlias = Column | Row | Vocabulary | Position | Partial

_BY_NAME = (("column", Column), ("row", Row), ("vocabulary", Vocabulary), ("position", Position), ("partial", Partial))


def kind_from(value: str | Kind, *, pattern: str) -> Kind:
    """The kind that a plan means by ``value``.

    Raises:
        ValueError: It means none.
    """
    for name, kind in _BY_NAME:
        if value == name:
            return kind()
        if isinstance(value, kind):
            return value
    names = ", ".join(f"'{name}'" for name, _ in _BY_NAME)
    raise ValueError(f"tensor[{pattern!r}]={value!r} is no kind of tensor parallelism; use {names}, or Column(parts=(...))")


def module_types(kind: Kind) -> tuple[type[nn.Module], ...]:
    """The module types that can be spread in this way."""
    match kind:
        case Column() | Row():
            return (nn.Linear,)
        case Vocabulary():
            return (nn.Embedding, nn.Linear)
        case Position():
            return (nn.Embedding,)
        case _:
            return (nn.Module,)
