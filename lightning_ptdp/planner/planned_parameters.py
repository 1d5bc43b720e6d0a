"""Effects of a plan on a module's parameters.

The functions here return the parameters that t divides, the numbers of parameters, and the sizes
that t has to divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from lightning_ptdp.pipeline.containers import ModelParts
from lightning_ptdp.planner.operation_recorder import Weight
from lightning_ptdp.planner.shapes import Divided, Parameters
from lightning_ptdp.shims.quantization import planned_elements, quantized_parameters
from lightning_ptdp.tensor_parallel import Experts, Kind, ParallelPlan, Region, Vocabulary
from lightning_ptdp.tensor_parallel.kinds import AttentionHeads as AttentionKind
from lightning_ptdp.tensor_parallel.kinds import Column, Row
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import output_input_sizes

Planned = Sequence[tuple[str, nn.Module, Kind]]
"""Name, module and kind of each module that a plan names."""


def planned_modules(module: nn.Module, plan: ParallelPlan) -> Planned:
    """Return the modules that the plan shards, in the module's order."""
    kinds = plan.resolve(module) if plan.tensor else {}
    return [(name, module.get_submodule(name), kind) for name, kind in kinds.items()]


def split_weights(planned: Planned) -> dict[int, Weight]:
    """Return the division of each parameter that t divides, by the parameter's ``id``."""
    weights = dict[int, Weight]()
    for _, child, kind in planned:
        parameters = dict(child.named_parameters())
        names: Iterable[str] = ()
        weight = Weight(split=True)
        match kind:
            case Vocabulary():
                names = parameters
                weight = Weight(split=True, table=True)
            case Column():
                names = parameters
                copied, least = _copied(kind, child)
                weight = Weight(split=True, copied=copied, least=least)
            case Row():
                names = ("weight",)
            case AttentionKind():
                names = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
            case Region():
                names = kind.per_head
        weights |= {id(parameters[name]): weight for name in names if name in parameters}
    return weights


def _copied(kind: Column, module: nn.Module) -> tuple[int, int]:
    """Return a column layer's outputs for key and value heads, and their least per rank."""
    if not kind.copy_heads or not isinstance(kind.heads, tuple):
        return 0, 0
    outputs, _ = output_input_sizes(module)
    parts = kind.parts or (outputs,)
    fewest = min(kind.heads)
    copied = [
        (part, part // count)
        for part, count in zip(parts, kind.heads, strict=True)
        if count == fewest
    ]
    if len(copied) == len(parts) > 1:  # equally many heads of each part: queries are not copied
        copied = copied[1:]
    return sum(part for part, _ in copied), sum(least for _, least in copied)


def parameters_of(
    parameters: Iterable[nn.Parameter], weights: Mapping[int, Weight], width: int
) -> Parameters:
    """Return the number of values of these parameters by how t divides them.

    Each parameter is counted once.

    Args:
        parameters: The parameters.
        weights: Their division (``split_weights``).
        width: Bytes of a parameter. Quantized ones count as fewer.
    """
    replicated = split = copied = 0
    heads = 1
    for p in dict.fromkeys(parameters):
        weight = weights.get(id(p), Weight())
        size = planned_elements(p, width)
        if not weight.split or size < p.numel():
            replicated += size
        elif weight.copied:
            outputs = max(size for size in p.shape if size >= weight.copied)
            copied_numel = p.numel() * weight.copied // outputs
            copied = copied + copied_numel
            split = split + p.numel() - copied_numel
            heads = max(1, weight.copied // weight.least)
        else:
            split += p.numel()
    return Parameters(replicated=replicated, split=split, copied=copied, heads=heads)


def counted(
    module: nn.Module, layers: Sequence[str], weights: Mapping[int, Weight], width: int
) -> dict[str, Parameters]:
    """Return the parameters of each layer by its name, without experts; see ``parameters_of``."""
    counts = dict[str, Parameters]()
    seen = set[int]()
    for name in layers:
        child = module.get_submodule(name)
        of_experts = {
            id(p)
            for submodule in child.modules()
            if Experts().fits(submodule)
            for p in submodule.parameters()
        }
        dense = [p for p in child.parameters() if id(p) not in of_experts | seen]
        seen |= {id(p) for p in dense}
        counts[name] = parameters_of(dense, weights, width)
    return counts


def tables(planned: Planned, parts: ModelParts) -> list[nn.Parameter | None]:
    """Return the largest vocabulary-parallel table before the layers, and the one after them."""
    by_end: list[list[nn.Parameter]] = [[], []]
    for name, child, kind in planned:
        weight = getattr(child, "weight", None)
        if isinstance(kind, Vocabulary) and isinstance(weight, nn.Parameter):
            in_head = any(f"{name}.".startswith(f"{top}.") for top in parts.after)
            by_end[in_head].append(weight)
    return [max(found, key=lambda table: table.numel(), default=None) for found in by_end]


def divided(module: nn.Module, planned: Planned) -> tuple[Divided, ...]:
    """Return the sizes that t has to divide."""
    if quantized_parameters(module):
        return (Divided(name="quantized weights", size=1),)
    sizes = dict.fromkeys(size for part in planned for size in _divided(*part))
    return tuple(sizes) or (Divided(name="modules that a plan shards", size=1),)


def _divided(name: str, module: nn.Module, kind: Kind) -> Iterator[Divided]:
    short = name.rpartition(".")[2]
    if isinstance(kind, Column):
        outputs, _ = output_input_sizes(module)
        parts = kind.parts or (outputs,)
        heads = kind.heads if isinstance(kind.heads, tuple) else (None,) * len(parts)
        for part, count in zip(parts, heads, strict=True):
            yield Divided(
                name=f"heads of {short}" if count else f"outputs of {short}",
                size=count or part,
                copied=bool(count) and kind.copy_heads,
            )
    elif isinstance(kind, Row):
        yield Divided(name=f"inputs of {short}", size=output_input_sizes(module)[1])
    elif isinstance(module, nn.MultiheadAttention):
        yield Divided(name="num_heads", size=module.num_heads)
    elif isinstance(kind, Region) and kind.heads is not None:
        yield Divided(name=f"heads of {short}", size=kind.heads)
