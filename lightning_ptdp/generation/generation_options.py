"""Options of text generation.

This module does not import torch, because the help of the command line must be fast. It is not a
part of ``__init__.py``, because jsonargparse also runs the imports for type checkers there.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptdp.base.option_types import Count, check_types


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of text generation.

    Args:
        max_new_tokens: Maximum number of tokens to write.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Sample only among the k most likely tokens; 0 or null: among all.
        top_p: Sample only among the most likely tokens that together have this probability; 1:
            among all.
        seed: Seed of the draws.
    """

    max_new_tokens: Count = 64
    temperature: float = 0.8
    top_k: Count | None = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.temperature < 0:
            raise ValueError(
                f"temperature={self.temperature!r} must not be negative. Use 0 for the most "
                "likely token"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p!r} must be greater than 0 and at most 1. Use 1 to sample "
                "among all tokens"
            )
