"""Dotted names, and modules found by their purpose."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from lightning_ptdp.tensor_parallel import Alias, Kind, Vocabulary, fits

__all__ = ["ends_of", "joined", "spread_ends", "vocabulary_of"]


def joined(*parts: str) -> str:
    """Join the parts that are not empty with dots."""
    return ".".join(part for part in parts if part)


def ends_of(module: Any) -> dict[str, nn.Module]:
    """Return token embedding and language-model head of a Hugging Face model, by name.

    The embedding of an image is not included.
    """
    ends: list[Any] = [module.get_output_embeddings()]
    # transformers raises it if there is no such embedding
    with contextlib.suppress(NotImplementedError):
        ends.append(module.get_input_embeddings())
    return {
        name: child
        for name, child in module.named_modules()
        if any(child is end for end in ends) and isinstance(child, nn.Embedding | nn.Linear)
    }


def spread_ends(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``ends_of`` that can be split.

    A module that shares its weight with one that cannot be split is excluded.
    """
    ends = ends_of(module)
    whole = [end.weight for end in ends.values() if not fits(end, Vocabulary())]
    return {
        name: end
        for name, end in ends.items()
        if fits(end, Vocabulary()) and all(end.weight is not weight for weight in whole)
    }


def vocabulary_of(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the kinds of embedding and head, if they can be split, and of their aliases.

    An alias is a module that holds one of their parameters under another name.
    """
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
