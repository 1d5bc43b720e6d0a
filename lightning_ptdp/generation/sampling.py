"""Choice of the next token.

It is a pure function of the logits and of numbers that are drawn beforehand. No random state
changes, and all ranks with the same logits choose the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.generation.generation_options import Sampling

__all__ = ["choose", "draw_numbers"]

_ONE = 2**52
"""Probability of 1; sums up to it are exact in float64."""


def draw_numbers(sampling: Sampling, rows: int) -> Tensor:
    """Draw a number in [0, 1) for every row and new token, (b, n) float64 on the CPU.

    The numbers of a row do not depend on the other rows.
    """
    generators = [
        torch.Generator().manual_seed(derive_seed(sampling.seed, row)) for row in range(rows)
    ]
    draws = [
        torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator)
        for generator in generators
    ]
    return torch.stack(draws)


def choose(logits_bv: Tensor, draws_b: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each row, (b) int64.

    It is the token at which the cumulative probability exceeds the row's number.
    """
    if sampling.temperature == 0:
        return logits_bv.argmax(-1)
    kept = min(sampling.top_k or logits_bv.size(-1), logits_bv.size(-1))
    values_bk, tokens_bk = logits_bv.topk(kept)
    # Integers, because a GPU adds floating-point numbers in any order, but all ranks must agree.
    shares_bk = ((values_bk.double() / sampling.temperature).softmax(-1) * _ONE).long()
    shares_bk = shares_bk * (shares_bk.cumsum(-1) - shares_bk < int(sampling.top_p * _ONE))
    cumulated_bk = shares_bk.cumsum(-1)
    drawn_b1 = (draws_b[:, None] * cumulated_bk[:, -1:]).long()
    at_b1 = torch.searchsorted(cumulated_bk, drawn_b1, right=True)
    # With NaN logits no share may exceed the number, so the position must be limited.
    return tokens_bk.gather(1, at_b1.clamp(max=kept - 1))[:, 0]
