"""Building blocks of the table of known models: ways of splitting a block's projections, by the
configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn

from lightning_ptdp.models.plans.module_names import joined
from lightning_ptdp.tensor_parallel import Column, Kind, PerRank, Region, Row, matches
from lightning_ptdp.tensor_parallel.local_sizes import Number

__all__ = [
    "Block",
    "Config",
    "OfConfig",
    "WhyNot",
    "attention",
    "by_heads",
    "by_kv_heads",
    "falcon_fused",
    "feed_forward",
    "fused",
    "gated",
    "has_one_kv_head",
    "kinds_of",
    "per_rank",
    "present",
    "with_bias",
    "with_sinks",
]

Config: TypeAlias = Any
OfConfig: TypeAlias = Callable[[Config], Kind]
Block: TypeAlias = Mapping[str, Kind | OfConfig]
"""Modules in a block, and what becomes of them; a function of the configuration where sizes
matter."""
WhyNot: TypeAlias = Mapping[Literal["sequence", "pipeline"], str]
"""Kind of parallelism that is not possible -> reason."""

T = TypeVar("T")
_REGION = Region()


def by_heads(config: Config) -> Kind:
    """A projection by heads; also a fused one that lists queries, keys and values head by head."""
    return Column(heads=config.num_attention_heads)


def by_kv_heads(config: Config) -> Kind:
    """A projection by heads of keys and values, of which there may be fewer than ranks."""
    return Column(heads=config.num_key_value_heads, copy_heads=True)


def fused(config: Config) -> Kind:
    """[q | k | v], all of the model's width."""
    return Column(parts=(config.hidden_size,) * 3, heads=(config.num_attention_heads,) * 3)


def gated(config: Config) -> Kind:
    """[gate | up] of a feed-forward part."""
    return Column(parts=(config.intermediate_size,) * 2)


def falcon_fused(config: Config) -> Kind:
    """Group by group of a head of keys and values: its queries, its keys, its values; of one such
    head [q | k | v]."""
    if has_one_kv_head(config):
        width = config.hidden_size // config.num_attention_heads
        return Column(
            parts=(config.hidden_size, width, width),
            heads=(config.num_attention_heads, 1, 1),
            copy_heads=True,
        )
    return (
        Column(heads=config.num_kv_heads)
        if getattr(config, "new_decoder_architecture", False)
        else by_heads(config)
    )


def has_one_kv_head(config: Config) -> bool:
    """Return True if all queries share one head of keys and values."""
    return config.multi_query and not getattr(config, "new_decoder_architecture", False)


def with_bias(*arguments: str) -> OfConfig:
    """A region that is given something for each head of the whole model."""

    def region(config: Config) -> Kind:
        return Region(heads=config.num_attention_heads, arguments=arguments)

    return region


def with_sinks(config: Config) -> Kind:
    """A region with a number of its own for each head."""
    return Region(heads=config.num_attention_heads, per_head=("sinks",))


def attention(
    name: str,
    split: str = "q_proj k_proj v_proj",
    out: str | None = "o_proj",
    *,
    by: OfConfig = by_heads,
    region: Kind | OfConfig | None = _REGION,
) -> Block:
    """An attention: its projections ``split`` (with blanks between them), and ``out`` by input
    features."""
    around: Block = {} if region is None else {name: region}
    behind: Block = {} if out is None else {joined(name, out): Row()}
    return {**around, **{joined(name, projection): by for projection in split.split()}, **behind}


def feed_forward(up: str, down: str, *, region: str | None = None) -> Block:
    """A feed-forward part: its projections ``up`` (with blanks between them) and ``down``, in a
    region if several have one input."""
    around: Block = {} if region is None else {region: _REGION}
    return {**around, **{projection: Column() for projection in up.split()}, down: Row()}


def per_rank(name: str, *attributes: str) -> dict[str, Mapping[str, Number]]:
    """Attributes of the module ``name`` that count what is split."""
    return {name: {attribute: PerRank() for attribute in attributes}}


def kinds_of(block: Block, config: Config, prefix: str) -> dict[str, Kind]:
    """Return the kinds of a block's modules in a model of this configuration, by their names behind
    ``prefix``."""
    return {
        joined(prefix, name): value if isinstance(value, Kind) else value(config)
        for name, value in block.items()
    }


def present(wanted: Mapping[str, T], module: nn.Module, prefix: str) -> dict[str, T]:
    """Return the entries for modules that the model, found under ``prefix``, has."""
    names = [joined(prefix, name) for name, _ in module.named_modules()]
    return {
        pattern: value
        for pattern, value in wanted.items()
        if any(matches(name, pattern) for name in names)
    }
