"""Rows of the table of known models, the parts of their blocks, and the plan that a row gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

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
        classes: Names of the bare model's class and of the classes with a language-model head.
        base: Attribute of a model with a head that holds the bare model; "" if it has the blocks
            itself.
        blocks: Repeated containers, in the order of their calls, with the modules in a block and
            their kinds.
        after: Modules that run after the blocks of their container. Other modules of the bare model
            run before them.
        beside: Kinds of other modules of the bare model.
        numbers: Modules in a block, and their attributes that count what is split; or a function of
            the configuration.
        why_not: Kinds of parallelism that are not possible, and why; or a function of the
            configuration.
    """

    classes: tuple[str, ...]
    base: str
    blocks: Mapping[str, Block]
    after: tuple[str, ...] = ()
    beside: Mapping[str, Kind] = field(default_factory=dict)
    numbers: Numbers | Callable[[Config], Numbers] = field(default_factory=dict)
    why_not: WhyNot | Callable[[Config], WhyNot] = field(default_factory=dict)


def family_plan(family: Family, module: nn.Module, prefix: str = "") -> ParallelPlan:
    """Return the plan of a model of the family with the name ``prefix``, bare or with a head."""
    inner = family.base if any(name == family.base for name, _ in module.named_modules()) else ""
    base = joined(prefix, inner)
    config = getattr(module.get_submodule(inner), "config", None)
    of_block = family.numbers(config) if callable(family.numbers) else family.numbers
    why_not = family.why_not(config) if callable(family.why_not) else family.why_not
    containers = tuple(joined(base, path) for path in family.blocks)
    tensor = kinds_of(family.beside, config, base)
    numbers: dict[str, Mapping[str, Number]] = {}
    for container, block in zip(containers, family.blocks.values(), strict=True):
        pattern = joined(container, "*")
        tensor |= kinds_of(block, config, pattern)
        numbers |= {joined(pattern, name): values for name, values in of_block.items()}
    is_one = len(containers) == 1
    plan = ParallelPlan(
        blocks=None if "pipeline" in why_not else containers[0] if is_one else containers,
        tensor=existing(tensor, module, prefix)
        | (vocabulary_of(module, prefix) if is_one else words_of(module, prefix)),
        sequence="blocks" if is_one and "sequence" not in why_not else None,
        numbers=existing(numbers, module, prefix),
        why_not=why_not,
    )
    if plan.blocks is None:
        return plan
    after = {joined(base, name) for name in family.after}
    before, between, behind = _order(module, prefix, base=base, containers=containers, after=after)
    return replace(plan, before=before, between=between, after=behind)


def _order(
    module: nn.Module, prefix: str, *, base: str, containers: tuple[str, ...], after: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return (modules before, between, and after the containers).

    In the bare model, modules that are not listed in ``after`` run before the blocks. Outside of
    it, modules run after them.
    """
    fronts: dict[str, int] = {}  # name -> index of the first container after it
    tails: dict[str, int] = {}  # name -> index of the last container before it
    for index, container in enumerate(containers):
        parent = module
        path = prefix
        for step in container.removeprefix(f"{prefix}." if prefix else "").split("."):
            for key, child in parent.named_children():
                name = joined(path, key)
                around = any(f"{inner}.".startswith(f"{name}.") for inner in containers)
                if around or not list(child.parameters()):
                    continue
                outside = bool(base) and not f"{name}.".startswith(f"{base}.")
                if outside or name in after:
                    tails[name] = index
                else:
                    fronts.setdefault(name, index)
            parent = parent.get_submodule(step)
            path = joined(path, step)
    # Of the modules after the blocks, the innermost run first.
    inside_out = sorted(tails, key=lambda name: -name.count("."))
    last = len(containers) - 1
    return (
        tuple(name for name, index in fronts.items() if index == 0),
        (
            *(name for name in inside_out if tails[name] < last),
            *(name for name, index in fronts.items() if index > 0),
        ),
        tuple(name for name in inside_out if tails[name] == last),
    )


def kinds_of(block: Block, config: Config, prefix: str) -> dict[str, Kind]:
    """Return the kinds of a block's modules in a model of this configuration.

    The names of the modules begin with ``prefix``.
    """
    return {
        joined(prefix, name): value if isinstance(value, Kind) else value(config)
        for name, value in block.items()
    }


def existing(wanted: Mapping[str, T], module: nn.Module, prefix: str) -> dict[str, T]:
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

    The embedding of an image is not included. A model of torch has neither.
    """
    if not hasattr(module, "get_output_embeddings"):
        return {}
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


def words_of(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the kinds of all embeddings and the head, if all can be split.

    They may share one weight.
    """
    ends = {
        joined(prefix, name): child
        for name, child in module.named_modules()
        if name.rpartition(".")[2] in ("shared", "embed_tokens", "lm_head", "proj_out")
    }
    if all(fits(end, Vocabulary()) for end in ends.values()):
        return {name: Vocabulary() for name in ends}
    return {}
