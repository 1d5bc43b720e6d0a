"""How our names and Hugging Face's correspond: a table a model, read in both directions.

A row pairs modules; its weight and bias go along. ``*`` stands for a block's number. A matrix that we fuse is a row with several of
theirs; one that they store as (in, out) is ``transposed``. Nothing is computed: a tensor of theirs is a rectangle of one of ours::

    ours  blocks.3.attention.qkv.weight [q | k | v]        theirs  model.layers.3.self_attn.k_proj.weight
                                         ^ rows here

To add a model: a module with a ``Family`` beside ``gpt2.py``, ``llama.py`` and ``bert.py``, and its name in ``families.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_ptdp.checkpoint import CheckpointError

__all__ = ["MOST_EXTENT", "Family", "Part", "Row", "check_choices"]

MOST_EXTENT = 1 << 28
"""Of one dimension of a model; the product of two is a number of elements that torch counts."""
Sizes = Callable[[Any], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module of ours and what it is called there.

    Attributes:
        ours: Name of our module.
        theirs: Name of their module, or of those whose outputs ours stacks.
        transposed: They store the weight as (in, out), as ``Conv1D`` does.
        sizes: From our configuration, how many rows each of ``theirs`` has; needed if there are several.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transposed: bool = False
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.theirs, str) or self.sizes is not None, f"{self.ours}: several parts need their sizes"

    @property
    def parts(self) -> tuple[str, ...]:
        """Their modules."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where one tensor of theirs lies in one of ours: all of it, or rows ``start`` to ``start + rows``."""

    ours: str
    transposed: bool
    start: int = 0
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model that both sides have.

    Attributes:
        model_type: What ``config.json`` calls it.
        architecture: Their class.
        rows: The table.
        base: What their names begin with in that class, and lack in files of the bare model.
        ignored: Regular expressions of names of theirs that hold no weights (masks, frequencies).
        tied: Our names that are tied to others, if the configuration ties them: alias -> name.
        build: Our configuration -> our model; called on the meta device.
        config_class: The class of our configuration.
        choices: Fields of our configuration that make it this model and no other: field -> value.
        config_from: Their configuration -> ours; raises a CheckpointError that names what ours lacks.
        config_to: Ours -> theirs; raises a CheckpointError that names what theirs lacks.
        is_tied: Whether our configuration ties ``tied``; default: always.
        older: What weights and biases are called in older files of theirs: name there -> name today.
    """

    model_type: str
    architecture: str
    rows: tuple[Row, ...]
    base: str
    ignored: tuple[str, ...]
    tied: Mapping[str, str]
    build: Callable[[Any], nn.Module]
    config_class: type[Any]
    choices: Mapping[str, Any]
    config_from: Callable[[Mapping[str, Any]], Any]
    config_to: Callable[[Any], dict[str, Any]]
    is_tied: Callable[[Any], bool] = lambda config: True
    older: Mapping[str, str] = field(default_factory=dict)

    def describes(self, config: Any) -> bool:
        """Whether a configuration of ours is of this model."""
        fits = isinstance(config, self.config_class)
        return fits and all(getattr(config, name) == value for name, value in self.choices.items())

    def place(self, theirs: str, config: Any) -> Part | None:
        """Where a tensor of theirs lies in ours, or None if the table does not have it."""
        module, _, kind = theirs.rpartition(".")
        kind = self.older.get(kind, kind)
        for row in self.rows:
            for number, name in enumerate(row.parts):
                found = re.fullmatch(_pattern(name), module)
                if found is None:
                    continue
                ours = f"{row.ours.replace('*', found.group(1)) if '*' in name else row.ours}.{kind}"
                transposed = row.transposed and kind == "weight"
                if row.sizes is None:
                    return Part(ours=ours, transposed=transposed)
                sizes = row.sizes(config)
                return Part(ours=ours, transposed=transposed, start=sum(sizes[:number]), rows=sizes[number])
        return None

    def names(self, ours: str, config: Any) -> Iterator[str]:
        """Their names for a tensor of ours, in its rows' order; none if the table does not have it."""
        module, _, kind = ours.rpartition(".")
        for row in self.rows:
            found = re.fullmatch(_pattern(row.ours), module)
            if found is not None:
                for name in row.parts:
                    yield f"{name.replace('*', found.group(1)) if '*' in row.ours else name}.{kind}"

    def aliases(self, config: Any) -> dict[str, str]:
        """Our tied names under a configuration: alias -> the name that is stored."""
        return dict(self.tied) if self.is_tied(config) else {}

    def shapes(self, config: Any, *, stored: int | None = None) -> dict[str, tuple[int, ...]]:
        """Our tensors of a configuration that are stored.

        Raises:
            CheckpointError: It is of a model with more layers than there are ``stored`` tensors, or too large for any machine.
        """
        sizes = {name: size for name, size in vars(config).items() if type(size) is int}
        if stored is not None and config.num_layers > stored:
            raise CheckpointError(f"the configuration has num_layers={config.num_layers}, but only {stored} tensors are stored")
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > MOST_EXTENT:
            raise CheckpointError(f"the configuration has {largest}={sizes[largest]}; no more than {MOST_EXTENT} make sense")
        with torch.device("meta"):
            state = self.build(config).state_dict()
        return {name: tuple(value.shape) for name, value in state.items() if name not in self.aliases(config)}

    def is_ignored(self, theirs: str) -> bool:
        """Whether a tensor of theirs holds no weights."""
        return any(re.search(pattern, theirs) for pattern in self.ignored)


def check_choices(model: str, choices: Mapping[str, tuple[Any, Any]]) -> None:
    """Compare fields of their configuration with the only value that our ``model`` has: field -> (found, wanted).

    Raises:
        CheckpointError: They differ; names the field and both values.
    """
    for name, (found, wanted) in choices.items():
        if found != wanted:
            raise CheckpointError(f"{name}={found!r}: our {model} would need {name}={wanted!r}")


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"(\d+)")
