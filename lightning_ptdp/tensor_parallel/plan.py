"""The description of a model that parallelism is applied from: which module is what, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from lightning_ptdp.layout import nearest_divisors
from lightning_ptdp.tensor_parallel.explain import explain
from lightning_ptdp.tensor_parallel.kinds import Column, Kind, Partial, Position, Row, Vocabulary, kind_from, module_types

__all__ = ["ParallelPlan", "matches", "nearest_names"]


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model may be cut; holds for every degree of parallelism.

    Args:
        blocks: Dotted path of the repeated container (``"model.h"``), which the pipeline cuts into stages.
        tensor: Glob patterns of module names (``"model.h.*.attn.qkv"``; ``*`` stands for one component or a part of it) and what
            becomes of these modules: ``"column"``, ``"row"``, ``"vocabulary"``, ``"position"``, ``"partial"`` or a ``Kind``.
        before: Modules that run before the blocks.
        after: Modules that run after the blocks.
        selective: Glob patterns of the modules inside the blocks that ``recompute="selective"`` recomputes: those that keep much for
            the backward and cost little, as the core of the attention (arXiv 2205.05198, section 5).

    Raises:
        ValueError: A kind is unknown.
    """

    blocks: str | None = None
    tensor: Mapping[str, str | Kind] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = {pattern: kind_from(value, pattern=pattern) for pattern, value in self.tensor.items()}
        object.__setattr__(self, "tensor", kinds)
        for name in ("before", "after", "selective"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name}={value!r} must be a list of module names: {name}=({value!r},)")
            object.__setattr__(self, name, tuple(value))

    def resolve(self, model: nn.Module) -> dict[str, Kind]:
        """Kind of every module that the plan names, in the model's order; a module found under two names is there twice.

        Raises:
            ValueError: A pattern matches nothing, two disagree, or a module's type cannot be spread in the way that is asked for.
        """
        modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        found: dict[str, Kind] = {}
        origin: dict[str, str] = {}
        for pattern, kind in self._kinds():
            names = [name for name in modules if matches(name, pattern)]
            if not names:
                raise ValueError(
                    f"the plan's tensor pattern {pattern!r} matches no module of {type(model).__name__}; {nearest_names(pattern, modules)}"
                )
            for name in names:
                if found.setdefault(name, kind) != kind:
                    raise ValueError(
                        f"the plan asks for {found[name]} and {kind} of module '{name}' (patterns {origin[name]!r} and "
                        f"{pattern!r}); keep one of them"
                    )
                origin.setdefault(name, pattern)
                _check_type(name, modules[name], kind)
        return {name: found[name] for name in modules if name in found}

    def check(self, model: nn.Module, tensor_parallel_size: int, sequence_parallel: bool = False) -> None:
        """Check everything that can be known without running the model.

        Numbers of heads are not visible here: only features are.

        Raises:
            ValueError: Of ``resolve``; ``blocks``, ``before``, ``after`` or ``selective`` name no module; a size does not divide; a
                weight is shared by modules that would be spread differently; sequence parallelism without a vocabulary-parallel
                embedding and head.
        """
        kinds = self.resolve(model)
        self._check_paths(model)
        if tensor_parallel_size == 1:
            return
        for name, kind in kinds.items():
            _check_module(name, model.get_submodule(name), kind, tensor_parallel_size)
        _check_tied(model, kinds)
        if sequence_parallel:
            _check_sequence_parallel(model, kinds)

    def explain(self, model: nn.Module) -> str:
        """A table of what becomes of every parameter, repeated layers together.

        Raises:
            ValueError: Of ``resolve``.
        """
        return explain(model, self.resolve(model))

    def _kinds(self) -> Iterator[tuple[str, Kind]]:
        for pattern, value in self.tensor.items():
            yield pattern, kind_from(value, pattern=pattern)

    def _check_paths(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        paths = [("blocks", self.blocks), *(("before", path) for path in self.before), *(("after", path) for path in self.after)]
        for label, path in paths:
            if path is not None and path not in modules:
                raise ValueError(
                    f"the plan's {label}={path!r} is no module of {type(model).__name__}; {nearest_names(path, modules)}"
                )
        for pattern in self.selective:
            if not any(matches(name, pattern) for name in modules):
                raise ValueError(
                    f"the plan's selective pattern {pattern!r} matches no module of {type(model).__name__}; "
                    f"{nearest_names(pattern, modules)}"
                )


def matches(name: str, pattern: str) -> bool:
    """Whether the glob ``pattern`` names the module ``name``, component by component."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(part, glob) for part, glob in zip(parts, wanted, strict=True))


def nearest_names(wanted: str, modules: Mapping[str, nn.Module]) -> str:
    """The end of an error message: names of ``modules`` that ``wanted`` may mean."""
    names = [name for name in modules if name]
    if not names:
        return "it has no submodules"
    close = get_close_matches(wanted, names, n=3, cutoff=0.4)
    return (
        f"nearest names: {', '.join(close)}" if close else f"it has: {', '.join(names[:5])}" + (", ..." if len(names) > 5 else "")
    )


def _check_type(name: str, module: nn.Module, kind: Kind) -> None:
    types = module_types(kind)
    if not isinstance(module, types):
        raise ValueError(
            f"module '{name}' is a {type(module).__name__}, which cannot be spread as {kind}; that takes "
            f"{' or '.join(f'nn.{t.__name__}' for t in types)}"
        )
    extra = sorted({key.partition(".")[0] for key, _ in module.named_parameters()} - {"weight", "bias"})
    if extra and not isinstance(kind, Partial):
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) has parameters {extra} beside weight and bias, which cannot be spread as "
            f"{kind}; leave it out of the plan"
        )


def _check_module(name: str, module: nn.Module, kind: Kind, size: int) -> None:
    if isinstance(module, nn.Linear):
        if isinstance(kind, Column) and kind.parts is not None:
            if sum(kind.parts) != module.out_features:
                raise ValueError(
                    f"'{name}': parts={kind.parts} add up to {sum(kind.parts)}, but out_features={module.out_features}; "
                    "list the sizes of all parts"
                )
            for index, part in enumerate(kind.parts):
                _check_divides(name, f"parts[{index}]", part, size)
        elif isinstance(kind, Column):
            _check_divides(name, "out_features", module.out_features, size)
        elif isinstance(kind, Row):
            _check_divides(name, "in_features", module.in_features, size)
    if isinstance(module, nn.Embedding) and isinstance(kind, Vocabulary | Position):
        options = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
        for option, value in options.items():
            if value:
                raise ValueError(
                    f"'{name}': nn.Embedding({option}={value}) cannot be spread over {size} ranks; build it without, or leave it "
                    "out of the plan"
                )


def _check_divides(name: str, label: str, number: int, size: int) -> None:
    if number % size:
        raise ValueError(
            f"'{name}': {label}={number} is not divisible by tensor_parallel_size={size}; a tensor_parallel_size that works: "
            f"{nearest_divisors(number, size)}"
        )


def _check_tied(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    users: dict[int, tuple[str, Kind | None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = kinds.get(name)
        spread = None if isinstance(kind, Position | Partial) else kind
        for parameter in module.parameters(recurse=False):
            other, before = users.setdefault(id(parameter), (name, spread))
            if before != spread:
                raise ValueError(
                    f"'{other}' and '{name}' share a weight, but the plan spreads them differently "
                    f"({before or 'not at all'} and {spread or 'not at all'}); give both the same kind, or leave both out"
                )


def _check_sequence_parallel(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    words = [model.get_submodule(name) for name, kind in kinds.items() if isinstance(kind, Vocabulary)]
    missing: Sequence[str] = [
        label
        for label, kind in (("embedding (nn.Embedding)", nn.Embedding), ("head (nn.Linear)", nn.Linear))
        if not any(isinstance(module, kind) for module in words)
    ]
    if missing:
        raise ValueError(
            "sequence_parallel=True splits the sequence behind the embedding and joins it in the head, but the plan has no "
            f"'vocabulary' {' and no '.join(missing)}; add it to tensor, or use sequence_parallel=False"
        )
