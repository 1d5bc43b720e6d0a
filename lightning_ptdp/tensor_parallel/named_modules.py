"""Modules that a plan names: patterns, numbers on a rank, checks of kinds, and a table.

Most forwards read sizes from their tensors and need no change. Some store numbers of heads or
features: Hugging Face's GPT-2 attention splits its fused projection by ``self.split_size``. A plan
names such attributes, and they are set to the value that is correct on a rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from lightning_ptdp.base.output import columns
from lightning_ptdp.tensor_parallel.kinds import Kind
from lightning_ptdp.tensor_parallel.kinds.kind import shape_text
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import stores_outputs_last


def matches(name: str, pattern: str) -> bool:
    """Return True if the glob ``pattern`` names the module ``name``, component by component."""
    return name.count(".") == pattern.count(".") and all(
        fnmatchcase(part, glob)
        for part, glob in zip(name.split("."), pattern.split("."), strict=True)
    )


def nearest_names(wanted: str, modules: Iterable[str]) -> str:
    """Return the end of an error message: names of ``modules`` similar to ``wanted``."""
    names = [name for name in modules if name]
    if not names:
        return "it has no submodules"
    close = get_close_matches(wanted, names, n=3, cutoff=0.4)
    if close:
        return f"nearest names: {', '.join(close)}"
    return f"it has: {', '.join(names[:5])}" + (", ..." if len(names) > 5 else "")


@dataclass(frozen=True, kw_only=True)
class PerRank:
    """A number that is divided by t: heads, or features of heads.

    Attributes:
        heads: Number of heads, if it may be smaller than t. Each rank then holds one head
            (``Column(copy_heads=True)``).
    """

    heads: int | None = None

    def parts(self, tensor_parallel_size: int) -> int:
        """Return the number of parts into which the number is divided."""
        return tensor_parallel_size if self.heads is None else min(self.heads, tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class PerCopy:
    """A number of queries per key/value head; smaller if several ranks hold the same head.

    Attributes:
        heads: Number of key/value heads.
    """

    heads: int

    def parts(self, tensor_parallel_size: int) -> int:
        """Return the number of parts into which the number is divided."""
        return max(1, tensor_parallel_size // self.heads)


Number: TypeAlias = PerRank | PerCopy
"""Rule that adapts a number to one rank."""

Numbers: TypeAlias = Mapping[str, Mapping[str, Number]]


def local_numbers(
    model: nn.Module, numbers: Numbers, *, tensor_parallel_size: int
) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, attribute, value on a rank) for each of the numbers.

    Raises:
        ValueError: A pattern matches no module, a module has no such attribute, or its value does
            not divide.
    """
    local = []
    modules = dict(model.named_modules())
    for pattern, attributes in numbers.items():
        if tensor_parallel_size > 1 and not any(matches(name, pattern) for name in modules):
            raise ValueError(
                f"the pattern {pattern!r} in the plan's numbers matches no module of "
                f"{type(model).__name__}; {nearest_names(pattern, modules)}"
            )
        for name, module in modules.items():
            for key, number in attributes.items() if matches(name, pattern) else ():
                if key not in vars(module):
                    raise ValueError(
                        f"the plan's numbers[{pattern!r}] names '{key}', which is not a plain "
                        f"attribute of '{name}' ({type(module).__name__}); it has: "
                        f"{', '.join(_plain(module)) or 'none'}"
                    )
                value = vars(module)[key]
                parts = number.parts(tensor_parallel_size)
                if value % parts:
                    raise ValueError(
                        f"'{name}': {key}={value} is not divisible by "
                        f"tensor_parallel_size={tensor_parallel_size}"
                    )
                local.append((module, key, value // parts))
    return local


def set_numbers(model: nn.Module, numbers: Numbers, *, tensor_parallel_size: int) -> None:
    """Set the numbers in place. Call it only once per model.

    Raises:
        ValueError: As in ``local_numbers``; no number is set then.
    """
    local = local_numbers(model, numbers, tensor_parallel_size=tensor_parallel_size)
    for module, key, value in local:
        setattr(module, key, value)


def _plain(module: nn.Module) -> list[str]:
    return sorted(
        key
        for key, value in vars(module).items()
        if isinstance(value, int) and not key.startswith("_")
    )


def check_type(name: str, module: nn.Module, kind: Kind) -> None:
    """Check that the type of module ``name`` can be sharded as ``kind``."""
    reason = kind.misfit(module)
    if reason is not None:
        raise ValueError(
            f"module '{name}' is a {type(module).__name__}, which cannot be sharded as {kind}: "
            f"{reason}"
        )
    parameters = {key.partition(".")[0] for key, _ in module.named_parameters()}
    extra = sorted(parameters - kind.parameters) if kind.parameters is not None else []
    if extra:
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) has parameters {extra} in addition to "
            f"weight and bias, which cannot be sharded as {kind}. Leave it out of the plan"
        )


def check_nested(kinds: Mapping[str, Kind]) -> None:
    """Check that no module inside of a module that a kind shards as one has a kind, too."""
    for inner, kind in kinds.items():
        name = inner
        while name:
            name = name.rpartition(".")[0]
            outer = kinds.get(name)
            # Regions and whole modules keep their parts, and aliases have none.
            if outer is not None and not outer.keeps_children and outer.ties != "any":
                raise ValueError(
                    f"the plan has {outer} for '{name}' and {kind} for '{inner}' inside of it. Keep "
                    f"one of them, and move own parameters of '{name}' into a module of their own"
                )


def check_tied(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Check that modules that share a weight are sharded in the same way."""
    users: dict[int, tuple[str, Kind | None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = kinds.get(name)
        if kind is not None and kind.ties == "any":
            continue
        spread = kind if kind is not None and kind.ties == "same" else None
        for parameter in module.parameters(recurse=False):
            first_user, before = users.setdefault(id(parameter), (name, spread))
            if before != spread:
                raise ValueError(
                    f"'{first_user}' and '{name}' share a weight, but the plan shards them "
                    f"differently ({before or 'not at all'} and {spread or 'not at all'}). "
                    "Give both the same kind, or leave both out"
                )


def check_ends(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Check that an embedding splits the sequence, and that a head joins it."""
    for name, _ in model.named_modules():
        if name.endswith(".lora_embedding_A"):
            raise ValueError(
                f"'{name.rpartition('.')[0]}' adapts an embedding after which "
                "sequence_parallel=True splits the sequence. Leave it out of target_modules, "
                "or use sequence_parallel=False"
            )
    words = [model.get_submodule(name) for name, kind in kinds.items() if kind.pads]
    missing = [
        label
        for label, kind in (
            ("embedding (nn.Embedding)", nn.Embedding),
            ("head (nn.Linear)", nn.Linear),
        )
        if not any(isinstance(module, kind) for module in words)
    ]
    if missing:
        raise ValueError(
            "sequence_parallel=True splits the sequence after the embedding and joins it in "
            f"the head, but the plan has no 'vocabulary' {' and no '.join(missing)}. Add it to "
            "tensor, or use sequence_parallel=False"
        )


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
        # A module around it may shard it, too.
        of_child = (kind.of_child(child) for child, kind in enclosing(module_name, kinds))
        row_kind = kinds.get(module_name) or next(filter(None, of_child), Kind())
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


def enclosing(name: str, kinds: Mapping[str, Kind]) -> Iterator[tuple[str, Kind]]:
    """Yield (child on the way to the module ``name``, kind) of modules around it, inside out."""
    while name:
        name, _, child = name.rpartition(".")
        if name in kinds:
            yield child, kinds[name]


def is_in_region(name: str, kinds: Mapping[str, Kind]) -> bool:
    """Return True if a module around ``name`` is a region."""
    return any(kind.is_region for _, kind in enclosing(name, kinds))


def _general(name: str) -> str:
    """Replace indices: ``h.3.norm.weight`` -> ``h.*.norm.weight``."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
