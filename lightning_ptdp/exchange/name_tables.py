"""Correspondence of our names and options with Hugging Face's: two tables for a model, read in both
directions.

A row pairs modules; its weight and bias go along. ``*`` stands for a block's number. A matrix that
we fuse is a row with several of theirs; one that they store as (in, out) is ``transposed``. Nothing
is computed: a tensor of theirs is a rectangle of one of ours::

    ours  blocks.3.attention.qkv.weight [q | k | v]        theirs  model.layers.3.self_attn.k_proj.weight
                                         ^ rows here

An option that both configurations have is a ``Field``. To add a model, write a module with a
``Family`` beside ``gpt2_weights.py``, ``llama_weights.py`` and ``bert_weights.py``, and add its
name to ``known_models.py``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_ptdp.base.checked_json import Check, Json, integer, number, optional, record
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.checkpoint.rectangles import Rectangle

__all__ = [
    "NUMBER",
    "SHARE",
    "SIZE",
    "SIZES",
    "Family",
    "Field",
    "Model",
    "Part",
    "Row",
    "check_choices",
]

_MOST_EXTENT = 1 << 28
"""Largest dimension of a model. The product of two still is a number of elements that torch can
count."""
SIZE, NUMBER, SHARE = integer(1, _MOST_EXTENT), number(0, 1e18), number(0, 1)
Sizes = Callable[[Any], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module of ours and what it is called there.

    Attributes:
        ours: Name of our module.
        theirs: Name of their module, or of those whose outputs ours stacks.
        transposed: They store the weight as (in, out), as ``Conv1D`` does.
        sizes: From our configuration, how many rows each of ``theirs`` has; needed if there are
            several.
        of_experts: Ours is a parameter (E, rows, columns), with that of the experts in its name;
            the second ``*`` of theirs is the expert's number.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transposed: bool = False
    sizes: Sizes | None = None
    of_experts: bool = False

    def __post_init__(self) -> None:
        assert isinstance(self.theirs, str) or self.sizes is not None, (
            f"{self.ours}: several parts need their sizes"
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """Their modules."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


@dataclass(frozen=True, kw_only=True)
class Part:
    """Position of one of their tensors in one of ours: all of it, or rows ``start`` to ``start +
    rows`` of ``full_rows``, in that with the number ``expert`` of ``experts``, if there are several
    along the first dimension."""

    ours: str
    transposed: bool
    start: int = 0
    rows: int | None = None
    full_rows: int | None = None
    expert: int = 0
    experts: int | None = None

    def at(self, shape: Sequence[int]) -> tuple[Rectangle, tuple[int, ...]]:
        """Its place in ours, of that shape; and for each dimension of theirs, which of ours it
        is."""
        first = 0 if self.experts is None else 1
        begin, extents, dims = [0] * len(shape), list(shape), range(first, len(shape))
        if self.rows is not None:
            begin[first], extents[first] = self.start, self.rows
        if first:
            begin[0], extents[0] = self.expert, 1
        return Rectangle.at(begin, extents), tuple(reversed(dims) if self.transposed else dims)


@dataclass(frozen=True, kw_only=True)
class Field:
    """An option of both configurations.

    Attributes:
        theirs: What ``config.json`` calls it.
        ours: What our configuration calls it.
        check: What it may be there, and from it what ours is.
        default: What ours is where the file leaves it out; ``...``: it must be there.
        written: The attribute of our configuration that is written: what an option that is left
            open comes to; None: nothing.
    """

    theirs: str
    ours: str
    check: Check[object]
    default: object = ...
    written: str | None = ""


SIZES = (
    Field(theirs="vocab_size", ours="vocabulary_size", check=SIZE),
    Field(theirs="max_position_embeddings", ours="sequence_length", check=SIZE),
    Field(theirs="num_hidden_layers", ours="num_layers", check=SIZE),
    Field(theirs="hidden_size", ours="hidden_size", check=SIZE),
    Field(theirs="num_attention_heads", ours="num_heads", check=SIZE),
    Field(theirs="intermediate_size", ours="ffn_hidden_size", check=SIZE, written="ffn_size"),
)
"""Names of the sizes in all models but the oldest."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model that both sides have.

    Attributes:
        model_type: What ``config.json`` calls it.
        architecture: Their class.
        rows: The table of modules.
        fields: The table of options.
        base: What their names begin with in that class, and lack in files of the bare model.
        ignored: Regular expressions of names of theirs that hold no weights (masks, frequencies).
        tied: Our names that are tied to others, if the configuration ties them: alias -> name.
        build: Our configuration -> our model; called on the meta device.
        make: The fields of our configuration -> our configuration.
        config_class: Its class.
        choices: Fields of our configuration that make it this model and no other: field -> value.
        fixed: Options of theirs of which our model knows one value only, theirs by default.
        checks: What other options of theirs may be that ``further`` reads.
        further: Their options, checked -> what else our configuration is made of; raises a
            CheckpointError that names what ours lacks.
        written: Our configuration -> what is written beside ``fields``; raises a CheckpointError
            that names what theirs lacks.
        is_tied: Whether our configuration ties ``tied``; default: always.
        older: What weights and biases are called in older files of theirs: name there -> name
            today.
    """

    model_type: str
    architecture: str
    rows: tuple[Row, ...]
    fields: tuple[Field, ...]
    base: str
    ignored: tuple[str, ...]
    tied: Mapping[str, str]
    build: Callable[[Any], nn.Module]
    make: Callable[..., Any]
    config_class: type[Any]
    choices: Mapping[str, object]
    fixed: Mapping[str, object] = field(default_factory=dict)
    checks: Mapping[str, Check[object]] = field(default_factory=dict)
    further: Callable[[Mapping[str, Any]], dict[str, object]] = lambda theirs: {}
    written: Callable[[Any], dict[str, object]] = lambda ours: {}
    is_tied: Callable[[Any], bool] = lambda config: True
    older: Mapping[str, str] = field(default_factory=dict)

    def read(self, theirs: Mapping[str, Json]) -> Model:
        """Our model of their configuration; null is as good as missing.

        Raises:
            ValueError: It is damaged, or a model that ours cannot be.
        """
        check_choices(
            self.config_class,
            {name: (theirs.get(name), wanted) for name, wanted in self.fixed.items()},
        )
        wanted = {
            one.theirs: one.check if one.default is ... else optional(one.check)
            for one in self.fields
        }
        given = record(
            others=True, **wanted, **{name: optional(check) for name, check in self.checks.items()}
        )(theirs)
        options = {
            one.ours: one.default if given[one.theirs] is None else given[one.theirs]
            for one in self.fields
        }
        return Model(self, self.make(**options, **self.further(given)))

    def is_ignored(self, theirs: str) -> bool:
        """Return True if one of their tensors holds no weights."""
        return any(re.search(pattern, theirs) for pattern in self.ignored)


@dataclass(frozen=True)
class Model:
    """A configuration of ours, and the family that it is of."""

    family: Family
    config: Any

    def write(self) -> dict[str, object]:
        """Their configuration.

        Raises:
            CheckpointError: A choice that theirs lacks; names it.
        """
        options = {
            one.theirs: getattr(self.config, one.written or one.ours)
            for one in self.family.fields
            if one.written is not None
        }
        named = {"architectures": [self.family.architecture], "model_type": self.family.model_type}
        return {**named, **options, **self.family.written(self.config)}

    def place(self, theirs: str) -> Part | None:
        """Return the position of one of their tensors in ours, or None if the table does not have
        it."""
        module, _, kind = theirs.rpartition(".")
        kind = self.family.older.get(kind, kind)
        for row in self.family.rows:
            for place, name in enumerate(row.parts):
                found = re.fullmatch(_pattern(name), module)
                if found is None:
                    continue
                ours = row.ours.replace("*", found.group(1)) if "*" in name else row.ours
                part = Part(
                    ours=ours if row.of_experts else f"{ours}.{kind}",
                    transposed=row.transposed and kind == "weight",
                )
                if row.of_experts:
                    part = replace(
                        part, expert=int(found.group(2)), experts=self.config.num_experts
                    )
                if row.sizes is None:
                    return part
                sizes = row.sizes(self.config)
                return replace(
                    part, start=sum(sizes[:place]), rows=sizes[place], full_rows=sum(sizes)
                )
        return None

    def parts(self, ours: str) -> Iterator[tuple[str, Part]]:
        """Their names for a tensor of ours, in its rows' order, and where they lie in it; none if
        the table does not have it."""
        module, _, kind = ours.rpartition(".")
        for row in self.family.rows:
            found = re.fullmatch(_pattern(row.ours), ours if row.of_experts else module)
            kind = "weight" if row.of_experts else kind
            names = row.parts if found is not None else ()
            for expert, name in itertools.product(
                range(self.config.num_experts) if row.of_experts else (0,), names
            ):
                assert found is not None
                theirs = name.replace("*", found.group(1), 1) if "*" in row.ours else name
                theirs = f"{theirs.replace('*', str(expert))}.{kind}"
                part = self.place(theirs)
                assert part is not None
                yield theirs, part

    @property
    def aliases(self) -> dict[str, str]:
        """Our tied names: alias -> the name that is stored."""
        return dict(self.family.tied) if self.family.is_tied(self.config) else {}

    def shapes(self, *, stored: int | None = None) -> dict[str, tuple[int, ...]]:
        """Our tensors that are stored.

        Raises:
            CheckpointError: The model has more layers than there are ``stored`` tensors, or is too
                large for any machine.
        """
        sizes = {name: size for name, size in vars(self.config).items() if type(size) is int}
        if stored is not None and self.config.num_layers > stored:
            raise CheckpointError(
                f"the configuration has num_layers={self.config.num_layers}, but only {stored} "
                "tensors are stored"
            )
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > _MOST_EXTENT:
            raise CheckpointError(
                f"the configuration has {largest}={sizes[largest]}; no more than {_MOST_EXTENT} "
                "make sense"
            )
        with torch.device("meta"):
            state = self.family.build(self.config).state_dict()
        return {
            name: tuple(value.shape) for name, value in state.items() if name not in self.aliases
        }


def check_choices(config_class: type, choices: Mapping[str, tuple[object, object]]) -> None:
    """Compare options of theirs, where they are given, with the only value that our model has: name
    -> (found, wanted).

    Raises:
        CheckpointError: They differ; names the option and both values.
    """
    model = config_class.__name__.removesuffix("Config").upper()
    for name, (found, wanted) in choices.items():
        if found is not None and found != wanted:
            raise CheckpointError(f"{name}={found!r}: our {model} would need {name}={wanted!r}")


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"(\d+)")
