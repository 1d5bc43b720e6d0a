"""Dotted names."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

__all__ = ["ends_of", "joined"]


def joined(*parts: str) -> str:
    """The parts with dots between them; empty ones left out."""
    return ".".join(part for part in parts if part)


def ends_of(module: Any) -> dict[str, Any]:
    """Embedding of tokens and language-model head of a Hugging Face model, by name; what embeds an image is neither."""
    ends: list[Any] = [module.get_output_embeddings()]
    with contextlib.suppress(NotImplementedError):  # how transformers says that a model has no such embedding
        ends.append(module.get_input_embeddings())
    return {
        name: child
        for name, child in module.named_modules()
        if any(child is end for end in ends) and isinstance(child, nn.Embedding | nn.Linear)
    }
