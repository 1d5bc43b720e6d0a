"""Checks of a model against the kinds that its plan gives to its modules."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_ptdp.tensor_parallel.kinds import Kind


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


def check_tied(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """Check that modules that share a weight are sharded alike."""
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
