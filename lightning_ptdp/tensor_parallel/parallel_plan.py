"""Plan of a model's parallelism: the role of each module, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lightning_ptdp.base.option_types import check_types
from lightning_ptdp.shims.peft import replaced_by, seen_through
from lightning_ptdp.tensor_parallel.kinds import SPLIT_AXES, Kind, kind_from
from lightning_ptdp.tensor_parallel.named_modules import (
    Number,
    check_ends,
    check_nested,
    check_tied,
    check_type,
    explain,
    local_numbers,
    matches,
    nearest_names,
)
from lightning_ptdp.tensor_parallel.sharded_adapters import adapter_kinds, check_adapters


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Description of how a model may be split, valid for every degree of parallelism.

    Args:
        blocks: Dotted path of the repeated container (``"model.h"``), which the pipeline cuts into
            stages. Several containers are given in the order of their calls
            (``("encoder.block", "decoder.block")``), and their layers are cut as one sequence.
        tensor: Maps glob patterns of module names to kinds. In a pattern
            (``"model.h.*.attn.qkv"``), ``*`` matches one component or a part of it. A kind is
            ``"column"``, ``"row"``, ``"vocabulary"``, ``"position"``, ``"partial"``,
            ``"attention"``, ``"alias"``, ``"region"``, ``"whole"``, ``"experts"`` or a ``Kind``.
        before: Modules that run before the blocks.
        between: Modules that run before the blocks of a further container, or whose results these
            blocks receive.
        after: Modules that run after the blocks.
        everywhere: Modules that every pipeline stage keeps, because their parameters are used
            without calling them (``F.linear(x, self.table.weight)``). Uses that the forward of an
            example shows need not be listed.
        selective: Glob patterns of the modules inside the blocks that ``recompute="selective"``
            recomputes. These keep many activations for the backward and are cheap, like the core of
            the attention (arXiv 2205.05198, section 5).
        numbers: Maps glob patterns of module names to their plain attributes that count something
            split, which must be correct on a rank: ``{"h.*.attn": {"split_size": PerRank()}}``.
        sequence: Where sequence parallelism splits the sequence. "ends": from the vocabulary
            embedding to the head. "blocks": within the blocks only, for models that read the
            sequence length outside of them. None: not possible.
        collects: True if the forward uses the blocks' outputs for more than the next block (all
            hidden states, router losses). All block outputs are then sent to all later pipeline
            stages. Outputs requested from Hugging Face models (``output_hidden_states=True``) and
            outputs that forward hooks on blocks receive are sent even if this is False.
        why_not: Reasons why "sequence" or "pipeline" parallelism is not possible, for the error
            message.

    Raises:
        ValueError: A kind or ``sequence`` is unknown.
    """

    blocks: str | tuple[str, ...] | None = None
    tensor: Mapping[str, str | Kind] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    numbers: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    sequence: Literal["ends", "blocks"] | None = "ends"
    collects: bool = False
    why_not: Mapping[Literal["sequence", "pipeline"], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "tensor", self.kinds)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Return the kind for each pattern of module names."""
        return {
            pattern: kind_from(value, pattern=pattern) for pattern, value in self.tensor.items()
        }

    @property
    def split_blocks(self) -> str:
        """Return the container within which ``sequence="blocks"`` splits the sequence."""
        blocks = self.blocks or ""
        assert isinstance(blocks, str), "sequence parallelism is refused for several"
        return blocks

    def splits_sequence(self, name: str, sequence_parallel: bool) -> bool:
        """Return True if the module or parameter ``name`` sees a slice of the sequence."""
        if not sequence_parallel or self.sequence is None or self._is_in_whole(name):
            return False
        inside = isinstance(self.blocks, str) and name.startswith(
            f"{self.blocks}." if self.blocks else ""
        )
        return inside or self.sequence == "ends"

    def partial(self, name: str, sequence_parallel: bool) -> tuple[str, ...]:
        """Return the axes over which the gradient of a replicated parameter must be summed."""
        return ("tensor",) if self.splits_sequence(name, sequence_parallel) else ()

    def _is_in_whole(self, name: str) -> bool:
        patterns = [pattern for pattern, kind in self.kinds.items() if kind.keeps_sequence]
        return any(
            matches(".".join(name.split(".")[: pattern.count(".") + 1]), pattern)
            for pattern in patterns
        )

    def resolve(self, model: nn.Module) -> dict[str, Kind]:
        """Return the kind of every module that the plan names, in the model's order.

        A module found under two names occurs twice.

        Raises:
            ValueError: A pattern matches nothing, two patterns disagree, or a module's type cannot
                be sharded as the requested kind.
        """
        kinds = self._matched(model)
        for name, kind in kinds.items():
            check_type(name, model.get_submodule(name), kind)
        return kinds

    def _matched(self, model: nn.Module) -> dict[str, Kind]:
        plain = {name: plain for name, plain, _ in seen_through(model) if plain}
        kinds: dict[str, Kind] = {}
        origin: dict[str, str] = {}
        for pattern, kind in self.kinds.items():
            names = [name for name, plain_name in plain.items() if matches(plain_name, pattern)]
            if not names:
                hint = nearest_names(pattern, dict.fromkeys(plain.values()))
                raise ValueError(
                    f"the plan's tensor pattern {pattern!r} matches no module of "
                    f"{type(model).__name__}; {hint}"
                )
            for name in names:
                if kinds.setdefault(name, kind) != kind:
                    raise ValueError(
                        f"the plan has both {kinds[name]} and {kind} for module '{name}' "
                        f"(patterns {origin[name]!r} and {pattern!r}). Keep one of them"
                    )
                origin.setdefault(name, pattern)
        for name, module in model.named_modules(remove_duplicate=False):
            if (base := f"{name}.{replaced_by(module)}") in kinds:
                kinds |= adapter_kinds(name, module, kinds[base])
        return {
            name: kinds[name]
            for name, _ in model.named_modules(remove_duplicate=False)
            if name in kinds
        }

    def divided(self, model: nn.Module, **degrees: int) -> dict[str, Kind]:
        """Return ``resolve`` restricted to kinds that split at these degrees of ``SPLIT_AXES``.

        Raises:
            ValueError: As in ``resolve``.
        """
        if max(degrees.values()) == 1:
            return {}
        return _at(self.resolve(model), degrees)

    def check(
        self,
        model: nn.Module,
        tensor_parallel_size: int,
        sequence_parallel: bool = False,
        *,
        converted: bool = False,
        **further: int,
    ) -> None:
        """Check everything that can be known without running the model.

        Only features are visible here. Numbers of heads are known only if the plan states them
        (``Column(heads=...)``).

        Args:
            model: The full model.
            tensor_parallel_size: Degree t.
            sequence_parallel: Whether sequence parallelism is used.
            converted: True if a precision plugin may have converted modules to types that cannot be
                sharded. This matters only if a degree is greater than 1.
            **further: Other degrees of ``SPLIT_AXES``.

        Raises:
            ValueError: As in ``resolve``; ``blocks``, ``before``, ``between``, ``after``,
                ``everywhere`` or ``selective`` name no module; a size does not divide; a weight is
                shared by modules that would be sharded differently; sequence parallelism without a
                vocabulary-parallel embedding and head, or with several containers.
        """
        degrees = dict.fromkeys(SPLIT_AXES, 1) | {"tensor": tensor_parallel_size} | further
        resolved = (
            self._matched(model)
            if converted and max(degrees.values()) == 1
            else self.resolve(model)
        )
        kinds = _at(resolved, degrees)
        self._check_paths(model)
        if max(degrees.values()) == 1:
            return
        check_adapters(model, kinds)
        local_numbers(model, self.numbers, tensor_parallel_size=tensor_parallel_size)
        for name, kind in kinds.items():
            kind.check(name, model.get_submodule(name), degrees[kind.axis])
        check_tied(model, kinds)
        check_nested(kinds)
        for name, kind in kinds.items():
            kind.check_inside(name, model.get_submodule(name), kinds)
        if sequence_parallel:
            self._check_sequence(model, kinds)

    def check_pipeline(self) -> None:
        """Check that the plan allows pipeline stages.

        Raises:
            ValueError: It does not; the message gives the reason.
        """
        if "pipeline" in self.why_not:
            raise ValueError(
                f"this model cannot be cut into pipeline stages: {self.why_not['pipeline']}. "
                "Use pipeline_parallel_size=1"
            )

    def explain(self, model: nn.Module) -> str:
        """Return a table of every parameter's sharding, with repeated layers merged.

        Raises:
            ValueError: As in ``resolve``.
        """
        return explain(
            model, self.resolve(model), splits=lambda name: self.splits_sequence(name, True)
        )

    def _check_sequence(self, model: nn.Module, kinds: Mapping[str, Kind]) -> None:
        if self.sequence == "ends":
            check_ends(model, kinds)
        if self.blocks is not None and not isinstance(self.blocks, str):
            raise ValueError(
                "sequence_parallel=True cannot split the sequences of "
                f"{' and '.join(self.blocks)}, which differ. Use sequence_parallel=False"
            )
        if self.sequence is None or (self.sequence == "blocks" and self.blocks is None):
            otherwise = (
                "its plan names no blocks" if self.sequence else "its plan says sequence=None"
            )
            raise ValueError(
                "sequence_parallel=True cannot split the sequence of this model: "
                f"{self.why_not.get('sequence', otherwise)}. Use sequence_parallel=False"
            )
        for name, kind in kinds.items():
            kind.check_sequence(name, model.get_submodule(name))

    def _check_paths(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = (self.blocks,) if isinstance(self.blocks, str) else self.blocks or ()
        named = {"blocks": blocks} | {
            key: getattr(self, key) for key in ("before", "between", "after", "everywhere")
        }
        for label, paths in named.items():
            for path in paths:
                if path not in modules:
                    raise ValueError(
                        f"the plan's {label}={path!r} is not a module of {type(model).__name__}; "
                        f"{nearest_names(path, modules)}"
                    )
        for pattern in self.selective:
            if not any(matches(name, pattern) for name in modules):
                raise ValueError(
                    f"the pattern {pattern!r} in the plan's selective matches no module of "
                    f"{type(model).__name__}; {nearest_names(pattern, modules)}"
                )


def _at(kinds: Mapping[str, Kind], degrees: Mapping[str, int]) -> dict[str, Kind]:
    return {name: at for name, kind in kinds.items() if (at := kind.at(degrees)) is not None}
