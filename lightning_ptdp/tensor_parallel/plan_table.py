"""Table that explains a plan to users."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

from lightning_ptdp.base.output import columns
from lightning_ptdp.tensor_parallel.kinds import Kind
from lightning_ptdp.tensor_parallel.kinds.kind import shape_text
from lightning_ptdp.tensor_parallel.linear_like import stores_outputs_last


def explain(model: nn.Module, kinds: Mapping[str, Kind], *, splits: Callable[[str], bool]) -> str:
    """Return a table with one row per parameter; equal rows of repeated layers are merged.

    The columns are the name, the shape, the shape on one of t ranks, and the sharding.

    Args:
        model: The full model.
        kinds: Kinds of its modules, by name.
        splits: Predicate: a parameter of this name sees a slice of the sequence under sequence
            parallelism.
    """
    counts: Counter[tuple[str, str, str, str]] = Counter()
    names: dict[int, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        kind = kinds.get(module_name) or _kind_above(module_name, kinds)
        row_kind = kind if kind is not None else Kind()
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}".lstrip(".")
            shape = tuple(parameter.shape)
            local, sharding = row_kind.describe(
                key, shape, outputs_last=stores_outputs_last(module)
            )
            if not splits(name):
                sharding = sharding.replace("; gradient partial under sequence parallelism", "")
            first = names.setdefault(id(parameter), name)
            if first != name:
                sharding = f"the same parameter as {first}"
            counts[_general(name), shape_text(shape), local, sharding] += 1
    rows = [("parameter", "shape", "on a rank", "sharding")]
    rows += [
        (f"{row[0]}  x{count}" if count > 1 else row[0], *row[1:]) for row, count in counts.items()
    ]
    return columns(rows, words=range(len(rows[0])))


def _kind_above(name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """Return the kind of an enclosing module that also shards this module."""
    child = ""
    while name:
        name, _, child = name.rpartition(".")
        outer_kind = kinds.get(name)
        if outer_kind is not None and (kind := outer_kind.of_child(child)) is not None:
            return kind
    return None


def _general(name: str) -> str:
    """Replace indices: ``h.3.norm.weight`` -> ``h.*.norm.weight``."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
