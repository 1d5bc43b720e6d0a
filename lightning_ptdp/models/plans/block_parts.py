"""Building blocks of the table of known models, and the names of their modules.

They describe how the projections of a block are split, depending on the configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn

from lightning_ptdp.tensor_parallel import (
    Alias,
    Column,
    Kind,
    PerRank,
    Region,
    Row,
    Vocabulary,
    fits,
    matches,
)
from lightning_ptdp.tensor_parallel.local_sizes import Number

Config: TypeAlias = Any
OfConfig: TypeAlias = Callable[[Config], Kind]
Block: TypeAlias = Mapping[str, Kind | OfConfig]
"""Modules in a block, and their kinds.

A kind that depends on sizes is a function of the configuration.
"""
WhyNot: TypeAlias = Mapping[Literal["sequence", "pipeline"], str]
"""Kind of parallelism that is not possible -> reason."""

T = TypeVar("T")
_REGION = Region()


def by_heads(config: Config) -> Kind:
    """Split a projection by heads.

    This includes a fused projection that lists queries, keys and values head by head.
    """
    return Column(heads=config.num_attention_heads)


def by_kv_heads(config: Config) -> Kind:
    """Split a projection by key/value heads, of which there may be fewer than ranks."""
    return Column(heads=config.num_key_value_heads, copy_heads=True)


def fused(config: Config) -> Kind:
    """Split [q | k | v], each as wide as the model."""
    return Column(parts=(config.hidden_size,) * 3, heads=(config.num_attention_heads,) * 3)


def gated(config: Config) -> Kind:
    """Split [gate | up] of a feed-forward part."""
    return Column(parts=(config.intermediate_size,) * 2)


def falcon_fused(config: Config) -> Kind:
    """Split the fused projection of Falcon.

    It lists one group after the other: the queries, the keys and the values of a key/value head.
    With a single such head, it is [q | k | v].
    """
    if has_one_kv_head(config):
        width = config.hidden_size // config.num_attention_heads
        return Column(
            parts=(config.hidden_size, width, width),
            heads=(config.num_attention_heads, 1, 1),
            copy_heads=True,
        )
    if getattr(config, "new_decoder_architecture", False):
        return Column(heads=config.num_kv_heads)
    return by_heads(config)


def has_one_kv_head(config: Config) -> bool:
    """Return True if all queries share one head of keys and values."""
    return config.multi_query and not getattr(config, "new_decoder_architecture", False)


def with_bias(*arguments: str) -> OfConfig:
    """Return a region whose ``arguments`` hold values for each head of the whole model."""

    def region(config: Config) -> Kind:
        return Region(heads=config.num_attention_heads, arguments=arguments)

    return region


def with_sinks(config: Config) -> Kind:
    """Return a region with a parameter ``sinks`` that has one value per head."""
    return Region(heads=config.num_attention_heads, per_head=("sinks",))


def attention(
    name: str,
    split: str = "q_proj k_proj v_proj",
    out: str | None = "o_proj",
    *,
    by: OfConfig = by_heads,
    region: Kind | OfConfig | None = _REGION,
) -> Block:
    """Return the kinds of an attention.

    ``split`` lists its projections by heads, separated by blanks. ``out`` is split by input
    features.
    """
    regions: Block = {} if region is None else {name: region}
    output: Block = {} if out is None else {joined(name, out): Row()}
    return {**regions, **{joined(name, projection): by for projection in split.split()}, **output}


def feed_forward(up: str, down: str, *, region: str | None = None) -> Block:
    """Return the kinds of a feed-forward part.

    ``up`` lists its first projections, separated by blanks. ``down`` is split by input features.
    They need a ``region`` if several projections have one input.
    """
    regions: Block = {} if region is None else {region: _REGION}
    return {**regions, **{projection: Column() for projection in up.split()}, down: Row()}


def per_rank(name: str, *attributes: str) -> dict[str, Mapping[str, Number]]:
    """Return attributes of the module ``name`` that count what is split."""
    return {name: {attribute: PerRank() for attribute in attributes}}


def kinds_of(block: Block, config: Config, prefix: str) -> dict[str, Kind]:
    """Return the kinds of a block's modules in a model of this configuration.

    The names of the modules begin with ``prefix``.
    """
    return {
        joined(prefix, name): value if isinstance(value, Kind) else value(config)
        for name, value in block.items()
    }


def present(wanted: Mapping[str, T], module: nn.Module, prefix: str) -> dict[str, T]:
    """Return the entries for modules that exist in the model with the name ``prefix``."""
    names = [joined(prefix, name) for name, _ in module.named_modules()]
    return {
        pattern: value
        for pattern, value in wanted.items()
        if any(matches(name, pattern) for name in names)
    }


# ---- Dotted names, and modules found by their purpose --------------------------------------------


def joined(*parts: str) -> str:
    """Join the parts that are not empty with dots."""
    return ".".join(part for part in parts if part)


def ends_of(module: Any) -> dict[str, nn.Module]:
    """Return token embedding and language-model head of a Hugging Face model, by name.

    The embedding of an image is not included.
    """
    ends: list[Any] = [module.get_output_embeddings()]
    # transformers raises it if there is no such embedding
    with contextlib.suppress(NotImplementedError):
        ends.append(module.get_input_embeddings())
    return {
        name: child
        for name, child in module.named_modules()
        if any(child is end for end in ends) and isinstance(child, nn.Embedding | nn.Linear)
    }


def spread_ends(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``ends_of`` that can be split.

    A module that shares its weight with one that cannot be split is excluded.
    """
    ends = ends_of(module)
    unsplit = [end.weight for end in ends.values() if not fits(end, Vocabulary())]
    return {
        name: end
        for name, end in ends.items()
        if fits(end, Vocabulary()) and all(end.weight is not weight for weight in unsplit)
    }


def vocabulary_of(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the kinds of embedding and head, if they can be split, and of their aliases.

    An alias is a module that holds one of their parameters under another name.
    """
    ends = spread_ends(module)
    parameter_ids = {id(parameter) for end in ends.values() for parameter in end.parameters()}
    aliases = (
        name
        for name, child in module.named_modules()
        if name not in ends
        and any(id(parameter) in parameter_ids for parameter in child.parameters(recurse=False))
    )
    kinds: dict[str, Kind] = {joined(prefix, name): Vocabulary() for name in ends}
    return kinds | {joined(prefix, name): Alias() for name in aliases}
