"""A plan as a table for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_ptdp.tensor_parallel.kinds import Column, Kind, Partial, Position, Row, Vocabulary

__all__ = ["explain"]


def explain(model: nn.Module, kinds: Mapping[str, Kind]) -> str:
    """One line a parameter, with equal ones of repeated layers together: name, shape, shape on one of t ranks, what happens."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    seen: dict[int, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        kind = kinds.get(module_name) or _partial_parent(module_name, kinds)
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}".lstrip(".")
            shape = tuple(parameter.shape)
            local, fate = _fate(kind, key, shape)
            first = seen.setdefault(id(parameter), name)
            if first != name:
                fate = f"the same parameter as {first}"
            counts[_general(name), _text(shape), local, fate] += 1
    rows = [("parameter", "shape", "on a rank", "what becomes of it")]
    rows += [(name + (f"  x{count}" if count > 1 else ""), *rest) for (name, *rest), count in counts.items()]  # type: ignore[misc]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _partial_parent(name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """The ``Partial`` kind of a module around this one."""
    while name:
        name = name.rpartition(".")[0]
        if isinstance(kinds.get(name), Partial):
            return kinds[name]
    return None


def _fate(kind: Kind | None, key: str, shape: Sequence[int]) -> tuple[str, str]:
    whole = _text(shape)
    match kind:
        case Column(parts=parts):
            fused = f", {len(parts)} parts each on its own" if parts is not None and len(parts) > 1 else ""
            return _text((f"{shape[0]}/t", *shape[1:])), f"column: split by output features{fused}"
        case Row() if key == "weight":
            return _text((shape[0], f"{shape[1]}/t")), "row: split by input features"
        case Row():
            return whole, "row: whole, added once; gradient partial under sequence parallelism"
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
