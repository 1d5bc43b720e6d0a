"""Plans of models that declare their own plan.

These are Llama, Mistral, Qwen, Gemma, GPT-NeoX and the Llama-like decoders of Hugging Face. Their
``tp_plan`` names the style of each module (``"colwise"``, ``"rowwise"`` …), their ``pp_plan`` the
children in the order of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ptdp.models.plans.block_parts import ends_of, joined, spread_ends
from lightning_ptdp.tensor_parallel import (
    Column,
    Kind,
    ParallelPlan,
    Partial,
    PerCopy,
    Region,
    Row,
    Vocabulary,
    Whole,
    fits,
    matches,
)

# In these models, ``chunk`` halves the fused projection of the gated feed-forward part; it halves
# the part of a rank as well.
_GATE_UP_IN_HALVES = ("phi3", "glm", "glm4")
_CODEGEN_SHARDS = (
    4  # queries, values and keys follow each other within a shard, so a rank must hold whole shards
)


def declares_plan(module: Any) -> bool:
    """Return True for a Hugging Face model that declares a tensor-parallel plan.

    A plan for only embedding and head does not count.
    """
    declared = getattr(module, "tp_plan", None) or {}
    return "rowwise" in declared.values() or "rowwise_split_input" in declared.values()


def declared_plan(module: Any, prefix: str = "") -> ParallelPlan:
    """Return the plan of a model that declares one and has the name ``prefix``.

    A module is replicated if it is declared as split and gathered again, or if its style is unknown
    here (experts). An attention or a feed-forward part is replicated if one of its projections has
    an unusual type (wrapped by an adapter, quantized). Under sequence parallelism, replicated
    modules receive the whole sequence. If there are fewer key/value heads than ranks, each rank
    gets one head.
    """
    ends = ends_of(module)
    tensor: dict[str, Kind] = {}
    numbers = {}
    unusual = set()
    for pattern, style in module.tp_plan.items():
        modules = {name: child for name, child in module.named_modules() if matches(name, pattern)}
        if not modules or modules.keys() & ends.keys():
            continue
        kind = _kind(module, pattern, style)
        parent = joined(prefix, pattern.rpartition(".")[0])
        if kind is not None and not all(fits(child, kind) for child in modules.values()):
            unusual.add(parent)
        if kind is None or parent in unusual:
            continue
        tensor[joined(prefix, pattern)] = kind
        if isinstance(kind, Column) and kind.copy_heads and isinstance(kind.heads, tuple):
            attention = pattern.rpartition(".")[0]
            if all(
                hasattr(child, "num_key_value_groups")
                for name, child in module.named_modules()
                if matches(name, attention)
            ):
                numbers[joined(prefix, attention)] = {
                    "num_key_value_groups": PerCopy(heads=kind.heads[0])
                }
    tensor = {
        pattern: kind
        for pattern, kind in tensor.items()
        if pattern.rpartition(".")[0] not in unusual
    }
    numbers = {pattern: values for pattern, values in numbers.items() if pattern not in unusual}
    _add_regions(module, prefix, tensor)
    tensor |= {joined(prefix, name): Vocabulary() for name in spread_ends(module)}
    blocks, before, after = _order(module, prefix)
    tensor |= {name: Whole() for name in _parts_kept_whole(module, prefix, blocks, tensor)}
    return ParallelPlan(
        blocks=blocks, tensor=tensor, before=before, after=after, numbers=numbers, sequence="blocks"
    )


def _parts_kept_whole(
    module: Any, prefix: str, blocks: str | None, tensor: Mapping[str, Kind]
) -> list[str]:
    """Return patterns of the parts of blocks that are not completely sharded, except norms.

    Their computation may need the whole sequence: an attention, or a mixture of experts whose
    router losses depend on all tokens.
    """
    patterns: dict[str, None] = {}
    container = (
        module.get_submodule(blocks.removeprefix(f"{prefix}.") if prefix else blocks)
        if blocks is not None
        else nn.Module()
    )
    for index, block in container.named_children():
        for key, part in block.named_children():
            name = joined(blocks or "", index, key)
            is_norm = not list(part.children()) and all(
                parameter.dim() < 2 for parameter in part.parameters()
            )
            if not is_norm and not all(
                _is_covered(joined(name, inner), child, tensor)
                for inner, child in part.named_modules()
            ):
                patterns[joined(blocks or "", "*", key)] = None
    return list(patterns)


def _is_covered(name: str, module: nn.Module, tensor: Mapping[str, Kind]) -> bool:
    """Return True if the module's own parameters are sharded.

    A split by heads counts only within a region, which provides the whole sequence.
    """
    if not _is_spread(name, module, tensor):
        return False
    by_heads = any(
        isinstance(kind, Column) and kind.heads is not None and matches(name, pattern)
        for pattern, kind in tensor.items()
    )
    parent = name.rpartition(".")[0]
    return not by_heads or any(
        isinstance(kind, Region) and matches(parent, pattern) for pattern, kind in tensor.items()
    )


def _kind(module: Any, pattern: str, style: str) -> Kind | None:
    config = module.config.get_text_config()
    name = pattern.rpartition(".")[2]
    chunked = config.model_type in _GATE_UP_IN_HALVES and name in ("gate_up_proj", "down_proj")
    heads, kv_heads = (
        getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    )
    match style:
        case "colwise" if name in ("k_proj", "v_proj") and kv_heads:
            return Column(heads=kv_heads, copy_heads=True)
        case "colwise" if name == "qkv_proj" and config.model_type == "codegen":
            return Column(heads=_CODEGEN_SHARDS)
        case "colwise" if name in ("q_proj", "k_proj", "v_proj", "query_key_value") and heads:
            return Column(heads=heads)
        case "colwise":
            return Column()
        case "colwise_gather_output" if chunked:
            return Column(parts=(config.intermediate_size,) * 2)
        case "rowwise_split_input" if chunked:
            return Row()
        case "rowwise":
            return Row()
        case "replicated_with_grad_allreduce":
            return Partial()
    return None


def _add_regions(module: Any, prefix: str, tensor: dict[str, Kind]) -> None:
    """Make regions of modules in which every matrix is split.

    These are attentions, and feed-forward parts with several column layers.
    """
    parents: dict[str, list[Column]] = {}
    for pattern, kind in tensor.items():
        if isinstance(kind, Column):
            parents.setdefault(pattern.rpartition(".")[0], []).append(kind)
    for parent, columns in parents.items():
        last = parent.rpartition(".")[2]
        is_attention = last in ("self_attn", "attention", "attn")
        modules = [
            (name, child)
            for name, child in module.named_modules()
            if matches(joined(prefix, name), parent)
        ]
        spread = all(
            _is_spread(joined(prefix, name, key), m, tensor)
            for name, child in modules
            for key, m in child.named_modules()
        )
        if spread and (is_attention or (last == "mlp" and len(columns) > 1)):
            tensor[parent] = Region()


def _is_spread(name: str, module: nn.Module, tensor: Mapping[str, Kind]) -> bool:
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    return not has_parameters or any(matches(name, pattern) for pattern in tensor)


def _order(module: Any, prefix: str) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Return (container, modules before it, modules after it) as the model declares them.

    Otherwise, return the container of its split modules.
    """
    declared: Mapping[str, Any] = getattr(module, "pp_plan", None) or {}
    children = dict(module.named_modules())
    # The head is declared first, because the class of the head is inspected first; all other names
    # are in the order of the calls.
    names = sorted(
        (name for name in declared if name in children), key=lambda name: "." not in name
    )
    lists = [name for name in names if isinstance(children[name], nn.ModuleList)]
    if len(lists) != 1:
        containers = {
            pattern.partition(".*")[0] for pattern in module.tp_plan if ".*" in pattern
        } & children.keys()
        return (joined(prefix, containers.pop()) if len(containers) == 1 else None), (), ()
    cut = names.index(lists[0])
    first, last = (
        tuple(joined(prefix, name) for name in part if list(children[name].parameters()))
        for part in (names[:cut], names[cut + 1 :])
    )
    return joined(prefix, lists[0]), first, last
