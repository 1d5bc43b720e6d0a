"""Dotted names, and the modules that are found by what they are for."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from lightning_ptdp.tensor_parallel import Alias, Kind, Vocabulary, fits

__all__ = ["ends_of", "joined", "spread_ends", "vocabulary_of"]


def joined(*parts: str) -> str:
    """The parts with dots between them; empty ones left out."""
    return ".".join(part for part in parts if part)


def ends_of(module: Any) -> dict[str, nn.Module]:
    """Embedding of tokens and language-model head of a Hugging Face model, by name; what embeds an
    image is neither."""
    ends: list[Any] = [module.get_output_embeddings()]
    with contextlib.suppress(
        NotImplementedError
    ):  # how transformers says that a model has no such embedding
        ends.append(module.get_input_embeddings())
    return {
        name: child
        for name, child in module.named_modules()
        if any(child is end for end in ends) and isinstance(child, nn.Embedding | nn.Linear)
    }


def spread_ends(module: nn.Module) -> dict[str, nn.Module]:
    """Those of ``ends_of`` that can be split: not one whose weight is also that of an end which
    cannot."""
    ends = ends_of(module)
    whole = [end.weight for end in ends.values() if not fits(end, Vocabulary())]
    return {
        name: end
        for name, end in ends.items()
        if fits(end, Vocabulary()) and all(end.weight is not weight for weight in whole)
    }


def vocabulary_of(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Embedding and head, where both can be split, and modules that hold a parameter of theirs
    under another name."""
    spread = spread_ends(module)
    own = {id(parameter) for end in spread.values() for parameter in end.parameters()}
    aliases = (
        name
        for name, child in module.named_modules()
        if name not in spread
        and any(id(parameter) in own for parameter in child.parameters(recurse=False))
    )
    found: dict[str, Kind] = {joined(prefix, name): Vocabulary() for name in spread}
    return found | {joined(prefix, name): Alias() for name in aliases}
