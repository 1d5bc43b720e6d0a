"""Rows of the table of known models, the parts of their blocks, and the plan that a row gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn

from lightning_ptdp.tensor_parallel import (
    Alias,
    Column,
    Kind,
    ParallelPlan,
    PerRank,
    Region,
    Row,
    Vocabulary,
    fits,
    matches,
)
from lightning_ptdp.tensor_parallel.named_modules import Number, Numbers

Config: TypeAlias = Any
OfConfig: TypeAlias = Callable[[Config], Kind]
Block: TypeAlias = Mapping[str, Kind | OfConfig]
"""Modules in a block, and their kinds.

A kind that depends on sizes is a function of the configuration.
"""
WhyNot: TypeAlias = Mapping[Literal["sequence", "pipeline"], str]
"""Kind of parallelism that is not possible -> reason."""

_REGION = Region()
_ENDS = (nn.Embedding, nn.Linear)


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
    """Return a region whose ``arguments`` hold values for each head of the full model."""

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


# ---- Rows, and their plans -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of the models in one file of transformers.

    Attributes:
        blocks: Repeated containers, in the order of their calls, with the modules in a block and
            their kinds.
        outside: Kinds of modules of the bare model outside of its blocks.
        before, between: Modules that run only before the first container, or before the next one.
        numbers: Modules in a block, and their attributes that count what is split; or a function of
            the configuration.
        why_not: Kinds of parallelism that are not possible, and why; or a function of the
            configuration.
    """

    blocks: Mapping[str, Block]
    outside: Block = field(default_factory=dict)
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    numbers: Numbers | Callable[[Config], Numbers] = field(default_factory=dict)
    why_not: WhyNot | Callable[[Config], WhyNot] = field(default_factory=dict)


def family_plan(family: Family, module: nn.Module, prefix: str = "") -> ParallelPlan | None:
    """Return the plan of a model of the family with the name ``prefix``, bare or with a head.

    The result is None if the module lacks a container, such as an encoder without its decoder.
    """
    names = [name for name, _ in module.named_modules()]
    base = getattr(module, "base_model_prefix", "")
    root = base if base in names else ""
    if not all(_exists(joined(root, path), names) for path in family.blocks):
        return None
    config = getattr(module, "config", None)
    of_block = family.numbers(config) if callable(family.numbers) else family.numbers
    why_not = family.why_not(config) if callable(family.why_not) else family.why_not
    kinds = {joined(root, name): kind for name, kind in family.outside.items()}
    numbers: dict[str, Mapping[str, Number]] = {}
    for path, block in family.blocks.items():
        pattern = joined(root, path, "*")
        kinds |= {joined(pattern, name): kind for name, kind in block.items()}
        numbers |= {joined(pattern, name): values for name, values in of_block.items()}
    kinds = {pattern: kind for pattern, kind in kinds.items() if _exists(pattern, names)}
    kinds |= vocabulary_of(module)
    filled = {
        name
        for name, child in module.named_modules(remove_duplicate=False)
        if list(child.parameters())
    }
    before, between = (
        tuple(joined(prefix, root, name) for name in early if joined(root, name) in filled)
        for early in (family.before, family.between)
    )
    containers = tuple(joined(prefix, root, path) for path in family.blocks)
    is_one = len(containers) == 1
    blocks = containers[0] if is_one else containers
    return ParallelPlan(
        blocks=None if "pipeline" in why_not else blocks,
        tensor={
            joined(prefix, pattern): kind if isinstance(kind, Kind) else kind(config)
            for pattern, kind in kinds.items()
        },
        before=before,
        between=between,
        sequence="blocks" if is_one and "sequence" not in why_not else None,
        numbers={
            joined(prefix, pattern): values
            for pattern, values in numbers.items()
            if _exists(pattern, names)
        },
        why_not=why_not,
    )


def _exists(pattern: str, names: Iterable[str]) -> bool:
    """Return True if the pattern matches one of the names."""
    return any(matches(name, pattern) for name in names)


# ---- Dotted names, and modules found by their purpose --------------------------------------------


def joined(*parts: str) -> str:
    """Join the parts that are not empty with dots."""
    return ".".join(part for part in parts if part)


def ends_of(module: Any) -> dict[str, nn.Module]:
    """Return token embeddings and language-model head of a Hugging Face model, by name.

    The embedding of an image is not included. A model of torch has neither.
    """
    if not hasattr(module, "get_output_embeddings"):
        return {}
    ends: list[Any] = [module.get_output_embeddings()]
    # transformers raises it if there is no such embedding
    with contextlib.suppress(NotImplementedError):
        ends.append(module.get_input_embeddings())
        if getattr(module.config, "is_encoder_decoder", False):
            ends.append(module.get_decoder().get_input_embeddings())
    return {
        name: child
        for name, child in module.named_modules()
        if any(child is end for end in ends) and isinstance(child, _ENDS)
    }


def vocabulary_of(module: nn.Module) -> dict[str, Kind]:
    """Return the kinds of the modules that hold a parameter of the embedding or the head.

    Embeddings and heads are split by token, unless one that shares their weight cannot be split.
    Other modules hold a parameter under another name.
    """

    def own(child: nn.Module) -> set[int]:
        return {id(parameter) for parameter in child.parameters(recurse=False)}

    shared = {key for end in ends_of(module).values() for key in own(end)}
    holders = {name: child for name, child in module.named_modules() if own(child) & shared}
    unsplit = set[int]()
    for child in holders.values():
        if isinstance(child, _ENDS) and not fits(child, Vocabulary()):
            unsplit |= own(child)
    return {
        name: Vocabulary() if isinstance(child, _ENDS) else Alias()
        for name, child in holders.items()
        if not own(child) & unsplit
    }
