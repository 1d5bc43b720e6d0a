"""Correspondence of native names and options with Hugging Face's: two tables per model.

Both tables are read in both directions. "Native" and ``ours`` mean the models of this package,
``theirs`` means Hugging Face's.

A row pairs modules, with their weights and biases. ``*`` stands for a block's number. A fused
native matrix is a row with several Hugging Face modules. A matrix that Hugging Face stores as (in,
out) is ``transposed``. Nothing is computed, because a Hugging Face tensor is a rectangle of a
native one::

    ours    blocks.3.attention.qkv.weight [q | k | v]
                                           ^ rows here
    theirs  model.layers.3.self_attn.k_proj.weight

An option of both configurations is a ``Field``. To add a model, write a module with a
``ModelTable`` beside ``gpt_weights.py`` and ``bert_weights.py``, and add the family to
``native_models.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_ptdp.base.checked_json import Check, Json, integer, number, optional, record
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.exchange.tensor_views import View
from lightning_ptdp.models.model_config import TransformerConfig
from lightning_ptdp.parameters.placement import Shape
from lightning_ptdp.parameters.rectangle import Rectangle

_MOST_EXTENT = 1 << 28
"""Largest dimension of a model.

torch can still count the elements of a tensor with two such dimensions.
"""
SIZE, NUMBER, SHARE = integer(1, _MOST_EXTENT), number(0, 1e18), number(0, 1)
Sizes = Callable[[Any], Sequence[int]]


def qkv_sizes(config: TransformerConfig) -> tuple[int, int, int]:
    """Return the rows of the queries, keys and values in the native matrix of all three."""
    kv_width = config.kv_heads * config.head_dim
    return config.hidden_size, kv_width, kv_width


@dataclass(frozen=True)
class NameRow:
    """One native module and its Hugging Face counterpart.

    Attributes:
        ours: Name of the native module.
        theirs: Name of the Hugging Face module, or the names of the modules whose outputs the
            native module stacks.
        transposed: Hugging Face stores the weight as (in, out), as ``Conv1D`` does.
        sizes: Function from the native configuration to the number of rows of each of ``theirs``;
            required if there are several.
        of_experts: The native tensor is a parameter (E, rows, columns), and ``ours`` is its full
            name. The second ``*`` of ``theirs`` is the number of the expert.
    """

    ours: str
    theirs: str | tuple[str, ...]
    _: KW_ONLY
    transposed: bool = False
    sizes: Sizes | None = None
    of_experts: bool = False

    def __post_init__(self) -> None:
        assert isinstance(self.theirs, str) or self.sizes is not None, (
            f"{self.ours}: several parts need their sizes"
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the Hugging Face modules."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def views(
        self, name: str, shape: Shape, config: object, *, block: str
    ) -> Iterator[tuple[str, View]]:
        """Yield the Hugging Face names of the parts of a native tensor, and the parts.

        Args:
            name: Name of the native tensor, whose module is that of this row.
            shape: Shape of the native tensor.
            config: The native configuration.
            block: Number of the block in the name; empty if ``ours`` has no ``*``.
        """
        kind = "weight" if self.of_experts else name.rpartition(".")[2]
        # Rows are the first dimension, or the second one after that of the experts.
        rows = int(self.of_experts)
        dims = tuple(range(rows, len(shape)))
        if self.transposed and kind == "weight":
            dims = dims[::-1]
        sizes = (shape[rows],) if self.sizes is None else self.sizes(config)
        for expert in range(shape[0]) if self.of_experts else (0,):
            begin = [expert] * rows + [0] * len(dims)
            for theirs, size in zip(self.parts, sizes, strict=True):
                place = Rectangle.at(begin, (*[1] * rows, size, *shape[rows + 1 :]))
                module = theirs.replace("*", block, 1).replace("*", str(expert))
                yield f"{module}.{kind}", View(name=name, place=place, dims=dims)
                begin[rows] += size


@dataclass(frozen=True)
class Field:
    """An option of both configurations.

    Attributes:
        ours: Name in the native configuration.
        theirs: Name in ``config.json``.
        check: Check of the value in ``config.json``, which returns the native value.
        default: Native value if ``config.json`` lacks the option; ``...``: the option is required.
        written: Attribute of the native configuration to write, which resolves an option that is
            left open; "": the attribute ``ours``; None: nothing is written.
    """

    ours: str
    theirs: str
    check: Check[object]
    _: KW_ONLY
    default: object = ...
    written: str | None = ""


SIZES = (
    Field("vocabulary_size", "vocab_size", SIZE),
    Field("sequence_length", "max_position_embeddings", SIZE),
    Field("num_layers", "num_hidden_layers", SIZE),
    Field("hidden_size", "hidden_size", SIZE),
    Field("num_heads", "num_attention_heads", SIZE),
    Field("ffn_hidden_size", "intermediate_size", SIZE, written="ffn_size"),
)
"""Options that give the sizes, under the names of all models except the oldest."""


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """A kind of model that both this package and Hugging Face have.

    Attributes:
        model_type: Name in ``config.json``.
        architecture: Name of the Hugging Face class.
        rows: The table of modules.
        fields: The table of options.
        base: Prefix of the names in that class, which files of the bare model lack.
        ignored: Regular expressions of Hugging Face names that hold no weights (masks,
            frequencies).
        tied: Native names that are tied: alias -> name. A configuration may have
            ``tie_embeddings=False``.
        hf_tied: Names that Hugging Face ties and leaves out of its files: alias -> stored name.
        build: Function from the native configuration to the native model; called on the meta
            device.
        make: Function from the native configuration's fields to the native configuration.
        config_class: Class of the native configuration.
        choices: Fields of the native configuration that distinguish this model: field -> value.
        fixed: Hugging Face options for which the native model supports one value only, which is
            Hugging Face's default.
        checks: Checks of the other Hugging Face options that ``further`` reads.
        further: Function from the checked Hugging Face options to further fields of the native
            configuration. It raises a CheckpointError that names an option that the native model
            lacks.
        written: Function from the native configuration to the options written beside ``fields``. It
            raises a CheckpointError that names an option that the Hugging Face model lacks.
        older: Names of weights and biases in older Hugging Face files: old name -> current name.
    """

    model_type: str
    architecture: str
    rows: tuple[NameRow, ...]
    fields: tuple[Field, ...]
    base: str
    ignored: tuple[str, ...]
    tied: Mapping[str, str]
    hf_tied: Mapping[str, str]
    build: Callable[[Any], nn.Module]
    make: Callable[..., Any]
    config_class: type[Any]
    choices: Mapping[str, object]
    fixed: Mapping[str, object] = field(default_factory=dict)
    checks: Mapping[str, Check[object]] = field(default_factory=dict)
    further: Callable[[Mapping[str, Any]], dict[str, object]] = lambda theirs: {}
    written: Callable[[Any], dict[str, object]] = lambda ours: {}
    older: Mapping[str, str] = field(default_factory=dict)

    def read(self, theirs: Mapping[str, Json]) -> Model:
        """Return the native model of a Hugging Face configuration; null counts as missing.

        Raises:
            ValueError: The configuration is damaged, or the native model does not support it.
        """
        check_choices(
            self.config_class,
            {name: (theirs.get(name), accepted) for name, accepted in self.fixed.items()},
        )
        accepted = {
            option.theirs: option.check if option.default is ... else optional(option.check)
            for option in self.fields
        }
        values = record(
            others=True,
            **accepted,
            **{name: optional(check) for name, check in self.checks.items()},
        )(theirs)
        options = {
            option.ours: option.default if values[option.theirs] is None else values[option.theirs]
            for option in self.fields
        }
        return Model(self, self.make(**options, **self.further(values)))

    def is_ignored(self, theirs: str) -> bool:
        """Return True if a Hugging Face tensor holds no weights."""
        return any(re.search(pattern, theirs) for pattern in self.ignored)

    def renamed(self, theirs: str) -> str:
        """Return the current name of a tensor of an older Hugging Face file."""
        module, _, kind = theirs.rpartition(".")
        return f"{module}.{self.older.get(kind, kind)}"


@dataclass(frozen=True)
class Model:
    """A native configuration and its family."""

    family: ModelTable
    config: Any

    def write(self) -> dict[str, object]:
        """Return the Hugging Face configuration.

        Raises:
            CheckpointError: The Hugging Face model lacks an option. The message names it.
        """
        options = {
            option.theirs: getattr(self.config, option.written or option.ours)
            for option in self.family.fields
            if option.written is not None
        }
        named = {"architectures": [self.family.architecture], "model_type": self.family.model_type}
        return {**named, **options, **self.family.written(self.config)}

    def views(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, View]]:
        """Yield the Hugging Face names of native tensors, each with its part of such a tensor.

        Args:
            shapes: Shapes of the native tensors by name.
        """
        for name, shape in shapes.items():
            for row in self.family.rows:
                owner = name if row.of_experts else name.rpartition(".")[0]
                match = re.fullmatch(re.escape(row.ours).replace(r"\*", r"(\d+)"), owner)
                if match is not None:
                    block = "".join(match.groups())
                    yield from row.views(name, shape, self.config, block=block)

    @property
    def aliases(self) -> dict[str, str]:
        """Return the tied native names: alias -> stored name."""
        return dict(self.family.tied) if getattr(self.config, "tie_embeddings", True) else {}

    def shapes(self, *, stored: int | None = None) -> dict[str, Shape]:
        """Return the shapes of the stored native tensors by name.

        Raises:
            CheckpointError: The model has more layers than there are ``stored`` tensors, or is too
                large for any machine.
        """
        sizes = {name: size for name, size in vars(self.config).items() if type(size) is int}
        if stored is not None and self.config.num_layers > stored:
            raise CheckpointError(
                f"the configuration has num_layers={self.config.num_layers}, but there are "
                f"only {stored} tensors"
            )
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > _MOST_EXTENT:
            raise CheckpointError(
                f"the configuration has {largest}={sizes[largest]}, more than the plausible "
                f"limit of {_MOST_EXTENT}"
            )
        with torch.device("meta"):
            state = self.family.build(self.config).state_dict()
        return {
            name: tuple(value.shape) for name, value in state.items() if name not in self.aliases
        }


def check_choices(config_class: type, choices: Mapping[str, tuple[object, object]]) -> None:
    """Compare given Hugging Face options with the only value that the native model supports.

    Args:
        config_class: Class of the native configuration.
        choices: Option -> (given value or None, supported value).

    Raises:
        CheckpointError: The values differ. The message names the option and both values.
    """
    model = config_class.__name__.removesuffix("Config").upper()
    for name, (value, supported) in choices.items():
        if value is not None and value != supported:
            raise CheckpointError(
                f"{name}={value!r} is not supported: our {model} needs {name}={supported!r}"
            )
