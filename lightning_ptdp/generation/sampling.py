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
    # float64, because float32 cumulative probabilities of a large vocabulary do not reach the last
    # draws.
    shares_bk = (values_bk.double() / sampling.temperature).softmax(-1)
    shares_bk = shares_bk * (shares_bk.cumsum(-1) - shares_bk < sampling.top_p)
    cumulated_bk = shares_bk.cumsum(-1)
    at_b1 = torch.searchsorted(cumulated_bk, draws_b[:, None] * cumulated_bk[:, -1:], right=True)
    # NaN logits never exceed the number, so the position must be limited.
    return tokens_bk.gather(1, at_b1.clamp(max=kept - 1))[:, 0]
