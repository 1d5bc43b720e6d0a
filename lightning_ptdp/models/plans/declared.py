"""Plans of models that declare their own plan.

These are Llama, Mistral, Qwen, Gemma, GPT-NeoX and the Llama-like decoders of Hugging Face. Their
``tp_plan`` names the style of each module (``"colwise"``, ``"rowwise"`` …), their ``pp_plan`` the
children in the order of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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

Modules: TypeAlias = Mapping[str, nn.Module]

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
    an unusual type (wrapped by an adapter, quantized), or if it has parameters for the heads or
    features of all ranks. Under sequence parallelism, replicated modules receive the full sequence.
    If there are fewer key/value heads than ranks, each rank gets one head.
    """
    modules: Modules = dict(module.named_modules())
    tensor = _declared_kinds(module, modules)
    numbers = {}
    for pattern, kind in tensor.items():
        parent = _parent(pattern)
        if isinstance(kind, Column) and kind.copy_heads and isinstance(kind.heads, tuple):
            attentions = (child for name, child in modules.items() if matches(name, parent))
            if all(hasattr(child, "num_key_value_groups") for child in attentions):
                numbers[parent] = {"num_key_value_groups": PerCopy(heads=kind.heads[0])}
    tensor |= _learned_activations(modules, tensor)
    _add_regions(modules, tensor)
    tensor |= dict.fromkeys(spread_ends(module), Vocabulary())
    blocks, before, after = _order(module, modules)
    if blocks is not None:
        tensor |= dict.fromkeys(_replicated_parts(modules[blocks], blocks, tensor), Whole())
    return ParallelPlan(
        blocks=joined(prefix, blocks) if blocks is not None else None,
        tensor={joined(prefix, pattern): kind for pattern, kind in tensor.items()},
        before=tuple(joined(prefix, name) for name in before),
        after=tuple(joined(prefix, name) for name in after),
        numbers={joined(prefix, pattern): values for pattern, values in numbers.items()},
        sequence="blocks",
    )


def _declared_kinds(module: Any, modules: Modules) -> dict[str, Kind]:
    config = module.config.get_text_config()
    ends = ends_of(module)
    tensor: dict[str, Kind] = {}
    unusual = set()
    for pattern, style in module.tp_plan.items():
        kind = _kind(config, pattern, style)
        names = [name for name in modules if matches(name, pattern)]
        if kind is None or not names or ends.keys() & set(names):
            continue
        tensor[pattern] = kind
        parent = _parent(pattern)
        if not all(fits(modules[name], kind) for name in names):
            unusual.add(parent)
        for name in names if isinstance(kind, Column) and parent not in unusual else ():
            norms = _norms_of_heads(modules[_parent(name)], modules[name])
            if norms is None:
                unusual.add(parent)
            else:
                tensor.update(dict.fromkeys((joined(parent, norm) for norm in norms), Partial()))
    return {pattern: kind for pattern, kind in tensor.items() if _parent(pattern) not in unusual}


def _norms_of_heads(part: Any, layer: Any) -> list[str] | None:
    """Return the names of the norms in ``part`` that are applied to each head of ``layer``.

    The result is None if a norm of queries or keys, a child as wide as the layer's output, or a
    parameter of ``part`` itself would need the heads or features of all ranks.
    """
    norms = []
    for key, child in part.named_children():
        shapes = {tuple(parameter.shape) for parameter in child.parameters()}
        is_norm = key in ("q_norm", "k_norm")
        if is_norm and shapes <= {(getattr(part, "head_dim", None),)}:
            norms.append(key)
        elif shapes and (is_norm or shapes == {(getattr(layer, "out_features", None),)}):
            return None
    return norms if all(parameter is None for parameter in part._parameters.values()) else None


def _kind(config: Any, pattern: str, style: str) -> Kind | None:
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


def _learned_activations(modules: Modules, tensor: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the modules beside column and row layers whose parameters are single numbers.

    A rank applies them to its features only. An example is Apertus' activation.
    """
    columns, rows = (
        {_parent(pattern) for pattern, kind in tensor.items() if isinstance(kind, one)}
        for one in (Column, Row)
    )
    beside = columns & rows
    partial: dict[str, Kind] = {}
    for name, module in modules.items():
        parameters = list(module.parameters())
        for parent in beside if parameters else ():
            pattern = joined(parent, name.rpartition(".")[2])
            is_number = all(parameter.numel() == 1 for parameter in parameters)
            if is_number and matches(name, pattern) and pattern not in tensor:
                partial[pattern] = Partial()
    return partial


def _add_regions(modules: Modules, tensor: dict[str, Kind]) -> None:
    """Make regions of modules in which every matrix is split.

    These are attentions, and feed-forward parts with several column layers.
    """
    columns = Counter(
        _parent(pattern) for pattern, kind in tensor.items() if isinstance(kind, Column)
    )
    for parent, count in columns.items():
        last = parent.rpartition(".")[2]
        is_attention = last in ("self_attn", "attention", "attn")
        spread = all(
            _is_spread(joined(name, key), part, tensor)
            for name, child in modules.items()
            if matches(name, parent)
            for key, part in child.named_modules()
        )
        if spread and (is_attention or (last == "mlp" and count > 1)):
            tensor[parent] = Region()


def _replicated_parts(
    container: nn.Module, blocks: str, tensor: Mapping[str, Kind]
) -> dict[str, None]:
    """Return patterns of the parts of blocks that are not completely sharded, except norms.

    Their computation may need the full sequence: an attention, or a mixture of experts whose
    router losses depend on all tokens.
    """
    patterns: dict[str, None] = {}
    for index, block in container.named_children():
        for key, part in block.named_children():
            is_norm = not list(part.children()) and all(
                parameter.dim() < 2 for parameter in part.parameters()
            )
            if not is_norm and not all(
                _is_covered(joined(blocks, index, key, inner), child, tensor)
                for inner, child in part.named_modules()
            ):
                patterns[joined(blocks, "*", key)] = None
    return patterns


def _is_covered(name: str, module: nn.Module, tensor: Mapping[str, Kind]) -> bool:
    """Return True if the module's own parameters are sharded.

    A split by heads counts only within a region, which provides the full sequence.
    """
    by_heads = any(
        isinstance(kind, Column) and kind.heads is not None and matches(name, pattern)
        for pattern, kind in tensor.items()
    )
    in_region = any(
        isinstance(kind, Region) and matches(_parent(name), pattern)
        for pattern, kind in tensor.items()
    )
    return _is_spread(name, module, tensor) and (in_region or not by_heads)


def _is_spread(name: str, module: nn.Module, tensor: Mapping[str, Kind]) -> bool:
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    return not has_parameters or any(matches(name, pattern) for pattern in tensor)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _order(module: Any, modules: Modules) -> tuple[str | None, Sequence[str], Sequence[str]]:
    """Return (container, modules before it, modules after it) as the model declares them.

    Otherwise, return the container of its split modules.
    """
    declared: Mapping[str, Any] = getattr(module, "pp_plan", None) or {}
    # The head is declared first, because the class of the head is inspected first; all other names
    # are in the order of the calls.
    names = sorted((name for name in declared if name in modules), key=lambda name: "." not in name)
    lists = [name for name in names if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        containers = {
            pattern.partition(".*")[0] for pattern in module.tp_plan if ".*" in pattern
        } & modules.keys()
        return containers.pop() if len(containers) == 1 else None, (), ()
    cut = names.index(lists[0])
    first, last = (
        [name for name in part if list(modules[name].parameters())]
        for part in (names[:cut], names[cut + 1 :])
    )
    return lists[0], first, last
