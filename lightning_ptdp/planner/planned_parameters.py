"""Effects of a plan on a module's parameters.

The functions here return the parameters that t divides, the numbers of parameters, and the sizes
that t has to divide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_ptdp.pipeline.containers import ModelParts, layers_of
from lightning_ptdp.planner.operation_recorder import Weight
from lightning_ptdp.planner.shapes import Divided, Parameters
from lightning_ptdp.shims.quantization import planned_elements, quantized_parameters
from lightning_ptdp.tensor_parallel import Experts, Kind, ParallelPlan, Region, Vocabulary
from lightning_ptdp.tensor_parallel.kinds import AttentionHeads as AttentionKind
from lightning_ptdp.tensor_parallel.kinds import Column, Row
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import output_input_sizes


def _kinds(module: nn.Module, plan: ParallelPlan) -> dict[str, Kind]:
    return plan.resolve(module) if plan.tensor else {}


def split_weights(module: nn.Module, plan: ParallelPlan) -> dict[int, Weight]:
    """Return the division of each parameter that t divides, by the parameter's ``id``."""
    weights = dict[int, Weight]()
    for name, kind in _kinds(module, plan).items():
        child = module.get_submodule(name)
        parameters = dict(child.named_parameters())
        if isinstance(kind, Vocabulary):
            weights |= {id(p): Weight(split=True, table=True) for p in parameters.values()}
        elif isinstance(kind, Column):
            copied, least = _copied(kind, child)
            weights |= {
                id(p): Weight(split=True, copied=copied, least=least) for p in parameters.values()
            }
        elif isinstance(kind, Row):
            weights |= {id(parameters["weight"]): Weight(split=True)}
        elif isinstance(kind, AttentionKind):
            names = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
            weights |= {
                id(parameters[key]): Weight(split=True) for key in names if key in parameters
            }
        elif isinstance(kind, Region):
            weights |= {
                id(parameters[key]): Weight(split=True)
                for key in kind.per_head
                if key in parameters
            }
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
    parameters: Iterable[nn.Parameter], weights: dict[int, Weight], width: int
) -> Parameters:
    """Return the number of values of these parameters by how t divides them.

    Each parameter is counted once.

    Args:
        parameters: The parameters.
        weights: Their division (``split_weights``).
        width: Bytes of a parameter. Quantized ones count as fewer.
    """
    whole = split = copied = 0
    heads = 1
    for p in dict.fromkeys(parameters):
        weight = weights.get(id(p), Weight())
        size = planned_elements(p, width)
        if not weight.split or size < p.numel():
            whole += size
        elif weight.copied:
            outputs = max(size for size in p.shape if size >= weight.copied)
            copied_numel = p.numel() * weight.copied // outputs
            copied = copied + copied_numel
            split = split + p.numel() - copied_numel
            heads = max(1, weight.copied // weight.least)
        else:
            split += p.numel()
    return Parameters(whole=whole, split=split, copied=copied, heads=heads)


def counted(
    module: nn.Module, plan: ParallelPlan, parts: ModelParts, width: int
) -> dict[str, Parameters]:
    """Return the parameters of each layer by its name, without experts; see ``parameters_of``."""
    weights = split_weights(module, plan)
    counts = dict[str, Parameters]()
    seen = set[int]()
    for layer in layers_of(module, parts.blocks):
        child = module.get_submodule(layer.name)
        of_experts = {
            id(p)
            for submodule in child.modules()
            if Experts().fits(submodule)
            for p in submodule.parameters()
        }
        dense = [p for p in child.parameters() if id(p) not in of_experts and id(p) not in seen]
        seen |= {id(p) for p in dense}
        counts[layer.name] = parameters_of(dense, weights, width)
    return counts


def tables(
    module: nn.Module, plan: ParallelPlan, parts: ModelParts
) -> tuple[nn.Parameter | None, nn.Parameter | None, bool]:
    """Return the largest vocabulary-parallel table of each end, and whether they are the same."""
    by_end: list[list[nn.Parameter]] = [[], []]
    for name, kind in _kinds(module, plan).items():
        weight = getattr(module.get_submodule(name), "weight", None)
        if isinstance(kind, Vocabulary) and isinstance(weight, nn.Parameter):
            in_head = any(f"{name}.".startswith(f"{top}.") for top in parts.after)
            by_end[in_head].append(weight)
    first, head = (max(tables, key=lambda table: table.numel(), default=None) for tables in by_end)
    return first, head, head is not None and head is first


def divided(module: nn.Module, plan: ParallelPlan) -> Sequence[Divided]:
    """Return the sizes that t has to divide."""
    if quantized_parameters(module):
        return (Divided(name="quantized weights", size=1),)
    sizes = Counter[Divided]()
    for name, kind in _kinds(module, plan).items():
        child = module.get_submodule(name)
        short = name.rpartition(".")[2]
        if isinstance(kind, Column):
            outputs, _ = output_input_sizes(child)
            parts = kind.parts or (outputs,)
            heads = kind.heads if isinstance(kind.heads, tuple) else (None,) * len(parts)
            for part, count in zip(parts, heads, strict=True):
                sizes[
                    Divided(
                        name=f"heads of {short}" if count else f"outputs of {short}",
                        size=count or part,
                        copied=bool(count) and kind.copy_heads,
                    )
                ] += 1
        elif isinstance(kind, Row):
            sizes[Divided(name=f"inputs of {short}", size=output_input_sizes(child)[1])] += 1
        elif isinstance(child, nn.MultiheadAttention):
            sizes[Divided(name="num_heads", size=child.num_heads)] += 1
        elif isinstance(kind, Region) and kind.heads is not None:
            sizes[Divided(name=f"heads of {short}", size=kind.heads)] += 1
    return tuple(sizes) or (Divided(name="modules that a plan shards", size=1),)
