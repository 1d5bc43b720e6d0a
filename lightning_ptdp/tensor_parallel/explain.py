"""A plan as a table for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_ptdp.tensor_parallel.kinds import Alias, Attention, Column, Kind, Partial, Position, Region, Row, Vocabulary
from lightning_ptdp.tensor_parallel.linear_like import stores_outputs_last

__all__ = ["explain"]


def explain(model: nn.Module, kinds: Mapping[str, Kind], *, splits: Callable[[str], bool]) -> str:
    """One line a parameter, with equal ones of repeated layers together: name, shape, shape on one of t ranks, what happens.

    Args:
        model: The whole module.
        kinds: What becomes of its modules.
        splits: Whether a parameter of this name sees a slice of the sequence under sequence parallelism.
    """
    counts: Counter[tuple[str, str, str, str]] = Counter()
    seen: dict[int, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        kind = kinds.get(module_name) or _kind_above(module_name, kinds)
        turned = stores_outputs_last(module)
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}".lstrip(".")
            shape = tuple(parameter.shape)
            local, fate = _fate(kind, key, shape, turned)
            if not splits(name):
                fate = fate.replace("; gradient partial under sequence parallelism", "")
            first = seen.setdefault(id(parameter), name)
            if first != name:
                fate = f"the same parameter as {first}"
            counts[_general(name), _text(shape), local, fate] += 1
    rows = [("parameter", "shape", "on a rank", "what becomes of it")]
    rows += [(name + (f"  x{count}" if count > 1 else ""), *rest) for (name, *rest), count in counts.items()]  # type: ignore[misc]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _kind_above(name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """The kind of a module around this one that speaks for its children."""
    child = ""
    while name:
        name, _, child = name.rpartition(".")
        match kinds.get(name):
            case Partial() as kind:
                return kind
            case Attention() if child == "out_proj":
                return Row()
    return None


def _fate(kind: Kind | None, key: str, shape: Sequence[int], turned: bool) -> tuple[str, str]:
    whole = _text(shape)
    match kind:
        case Column(parts=parts, heads=heads):
            dim = len(shape) - 1 if turned else 0
            fused = f", {len(parts)} parts each on its own" if parts is not None and len(parts) > 1 else ""
            whole_heads = f", whole heads ({', '.join(map(str, heads))})" if isinstance(heads, tuple) else ""
            copied = ", at least one" if kind.copy_heads else ""
            return _text((*shape[:dim], f"{shape[dim]}/t", *shape[dim + 1 :])), (
                f"column: split by output features{fused}{whole_heads}{copied}"
            )
        case Attention():
            return _text((f"{shape[0]}/t", *shape[1:])), "column: q, k and v each split by heads"
        case Row() if key == "weight":
            dim = 0 if turned else 1
            return _text((*shape[:dim], f"{shape[dim]}/t", *shape[dim + 1 :])), "row: split by input features"
        case Row():
            return whole, "row: whole, added once; gradient partial under sequence parallelism"
        case Region():
            return whole, "whole; gradient partial under sequence parallelism"
        case Alias():
            return "as its other name", "alias: another name of a spread parameter"
        case Vocabulary():
            return _text((f"ceil({shape[0]}/t)", *shape[1:])), "vocabulary: split by token"
        case Position():
            return whole, "position: whole; gradient partial under sequence parallelism"
        case Partial():
            return whole, "whole; gradient partial"
        case _:
            return whole, "whole; gradient partial under sequence parallelism"


def _general(name: str) -> str:
    """``h.3.norm.weight`` -> ``h.*.norm.weight``."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def _text(shape: Sequence[object]) -> str:
    return f"({', '.join(str(size) for size in shape)})"
