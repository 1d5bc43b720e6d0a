"""How the next token is chosen. A pure function of the logits and of numbers that are drawn beforehand: nobody's random state is touched,
and all ranks that have the same logits choose the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.option_types import Count, check_types
from lightning_ptdp.random import derive_seed

__all__ = ["Sampling", "choose", "draw_numbers"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How text is written.

    Args:
        max_new_tokens: Number of tokens to write at most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens only; 0 or null: among all.
        top_p: Sample among the most likely tokens that together have this probability only; 1: among all.
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
            raise ValueError(f"temperature={self.temperature!r} must not be negative; 0 takes the most likely token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be above 0 and at most 1; 1 samples among all tokens")


def draw_numbers(sampling: Sampling, rows: int) -> Tensor:
    """A number in [0, 1) for every row and new token, (b, n) float64 on the CPU; a row's do not depend on the others."""
    generators = [torch.Generator().manual_seed(derive_seed(sampling.seed, row)) for row in range(rows)]
    draws = [torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator) for generator in generators]
    return torch.stack(draws)


def choose(logits_bv: Tensor, draws_b: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each row, (b) int64: the one at which the cumulated probability passes the row's number."""
    if sampling.temperature == 0:
        return logits_bv.argmax(-1)
    kept = min(sampling.top_k or logits_bv.size(-1), logits_bv.size(-1))
    values_bk, tokens_bk = logits_bv.topk(kept)
    # float64: in float32 the cumulated probabilities of a large vocabulary do not reach the last draws.
    shares_bk = (values_bk.double() / sampling.temperature).softmax(-1)
    shares_bk = shares_bk * (shares_bk.cumsum(-1) - shares_bk < sampling.top_p)
    cumulated_bk = shares_bk.cumsum(-1)
    at_b1 = torch.searchsorted(cumulated_bk, draws_b[:, None] * cumulated_bk[:, -1:], right=True)
    # Logits that are no numbers pass nowhere.
    return tokens_bk.gather(1, at_b1.clamp(max=kept - 1))[:, 0]
