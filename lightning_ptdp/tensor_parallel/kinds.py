"""The ways in which a module can be spread over the tensor group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from lightning_ptdp.tensor_parallel.linear_like import has_own_forward, is_linear

__all__ = [
    "Alias",
    "Attention",
    "Column",
    "Kind",
    "Partial",
    "Position",
    "Region",
    "Row",
    "Vocabulary",
    "Whole",
    "fits",
    "kind_from",
    "misfit",
]


@dataclass(frozen=True, kw_only=True)
class Column:
    """``nn.Linear`` (or ``Conv1D``, or an ``nn.Embedding`` of something for each head) split by output features.

    Attributes:
        parts: Output sizes of the parts of a fused layer, e.g. (q, k, v), each split on its own; None: one part.
        heads: Number of attention heads in each part: what must not be cut through. None: any number of features is a share.
        copy_heads: Parts with fewer heads than there are ranks (grouped and multi-query attention, arXiv 2305.13245, 1911.02150)
            give every rank one head; the ranks whose queries share it hold the same one.
    """

    parts: tuple[int, ...] | None = None
    heads: tuple[int, ...] | int | None = None
    copy_heads: bool = False

    def __post_init__(self) -> None:
        if self.parts is not None:
            object.__setattr__(self, "parts", _sizes("parts", self.parts, "output sizes, like (768, 768, 768)"))
        if self.heads is not None:
            heads = (self.heads,) if isinstance(self.heads, int) else self.heads
            object.__setattr__(self, "heads", _sizes("heads", heads, "numbers of heads, like (12, 4, 4)"))
            assert isinstance(self.heads, tuple)
            if len(self.heads) != len(self.parts or (0,)):
                raise ValueError(f"Column(parts={self.parts}, heads={self.heads}): give one number of heads for each part")

    def __repr__(self) -> str:
        heads = f", heads={self.heads}" if self.heads is not None else ""
        return f"Column(parts={self.parts}{heads}{', copy_heads=True' if self.copy_heads else ''})"

    def part_sizes(self, out_features: int) -> tuple[int, ...]:
        """Output sizes of the parts."""
        return self.parts if self.parts is not None else (out_features,)

    def copies(self, tensor_parallel_size: int) -> tuple[int, ...]:
        """How many ranks hold the same slice of each part."""
        if not self.copy_heads or not isinstance(self.heads, tuple):
            return (1,) * len(self.parts or (0,))
        return tuple(max(1, tensor_parallel_size // count) for count in self.heads)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``nn.Linear`` (or ``Conv1D``) split by input features; its input comes from column layers."""


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


@dataclass(frozen=True, kw_only=True)
class Attention:
    """``nn.MultiheadAttention`` with its heads split; its projections are a column and a row layer."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A module whose own parameters are other names of parameters of spread modules and are not used by its forward, like
    ``predictions.bias`` of Hugging Face's BERT, which is its decoder's: they become the spread ones."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A module around column layers that all take its first argument, and the row layer behind them: the argument's gradient is summed
    over the group once, not once for each column layer. Nothing in it may be kept whole, except what is ``Partial``.

    Attributes:
        heads: Number of attention heads, which the following have to be told.
        arguments: Arguments of its forward with something for each head, of which a rank is given that of its own (the biases of ALiBi,
            arXiv 2108.12409): (b, n, ...) of four dimensions, (b n, ...) of three.
        per_head: Its own parameters with an element for each head along dimension 0, split as the heads are.
    """

    heads: int | None = None
    arguments: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.arguments or self.per_head) and self.heads is None:
            raise ValueError(f"Region(arguments={self.arguments}, per_head={self.per_head}): give the number of heads, too")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A module inside the blocks that every rank computes for the whole sequence where the sequence is split around it: of its output
    each keeps its own slice. What is spread in it is spread without sequence parallelism. Without that, it says nothing."""


Kind: TypeAlias = Column | Row | Vocabulary | Position | Partial | Attention | Alias | Region | Whole

_BY_NAME = (
    ("column", Column),
    ("row", Row),
    ("vocabulary", Vocabulary),
    ("position", Position),
    ("partial", Partial),
    ("attention", Attention),
    ("alias", Alias),
    ("region", Region),
    ("whole", Whole),
)


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


def fits(module: nn.Module, kind: Kind) -> bool:
    """Whether the module's type can be spread in this way."""
    return misfit(module, kind) is None


def misfit(module: nn.Module, kind: Kind) -> str | None:
    """Why the module cannot be spread in this way, by its type; None if it can."""
    match kind:
        case Column() if isinstance(module, nn.Embedding):
            fits, takes = True, ""
        case Column() | Row():
            fits, takes = is_linear(module), "nn.Linear (or the Conv1D of transformers)"
        case Vocabulary():
            fits, takes = isinstance(module, nn.Embedding | nn.Linear), "nn.Embedding or nn.Linear"
        case Position():
            fits, takes = isinstance(module, nn.Embedding), "nn.Embedding"
        case Attention():
            fits, takes = isinstance(module, nn.MultiheadAttention), "nn.MultiheadAttention"
        case _:
            return None
    if not fits:
        return f"that takes {takes}"
    for base in (nn.Linear, nn.Embedding, nn.MultiheadAttention):
        if has_own_forward(module, base):
            return (
                f"its forward is not that of nn.{base.__name__}, and what it does beside would be lost; leave it out of the plan"
            )
    return None


def _sizes(name: str, value: object, what: str) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"Column({name}={value!r}): {name} must be positive {what}")
    return sizes
