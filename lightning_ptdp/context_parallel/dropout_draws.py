"""Random draws for slices of the sequence, equal to those of one process.

The numbers of the full sequence are drawn, and a rank keeps those of its slice.

All context ranks draw from one stream outside of the blocks. Values of a sample (a diffusion's
time, a mixing factor) are therefore the same on all ranks, and values of a token are those of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ptdp.attention import shard_sequence

_Fills = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class SliceDraws:
    """Replacements of torch's drawing functions on one rank.

    Attributes:
        length: Tokens of the full sequence; a slice (b, s/c, ...) has its share of them along
            dimension 1.
        rank: Rank in the context group.
        size: c.
        applies: Returns True while all ranks draw from one stream.
    """

    length: int
    rank: int
    size: int
    applies: Callable[[], bool]

    def replaced(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Return torch's functions and their replacements."""
        in_place = (
            Tensor.uniform_,
            Tensor.normal_,
            Tensor.random_,
            Tensor.exponential_,
            Tensor.bernoulli_,
        )
        return {
            **{method: partial(self._fill, method) for method in in_place},
            torch.rand: partial(self._new, Tensor.uniform_),
            torch.randn: partial(self._new, Tensor.normal_),
            torch.rand_like: partial(self._like, Tensor.uniform_),
            torch.randn_like: partial(self._like, Tensor.normal_),
            torch.randint: self._integers,
            F.dropout: self._dropout,
        }

    def _is_slice(self, x: Tensor) -> bool:
        return self.applies() and x.dim() > 1 and x.size(1) * self.size == self.length

    def _fill(self, method: _Fills, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._is_slice(x) or any(
            isinstance(value, Tensor) for value in (*args, *kwargs.values())
        ):
            return method(x, *args, **kwargs)
        full = x.new_empty((x.size(0), self.length, *x.shape[2:]))
        with torch.no_grad():
            return x.copy_(
                shard_sequence(method(full, *args, **kwargs), 1, rank=self.rank, size=self.size)
            )

    def _new(self, method: _Fills, *size: Any, **kwargs: Any) -> Tensor:
        generator = kwargs.pop("generator", None)
        return self._fill(method, torch.empty(*size, **kwargs), generator=generator)

    def _like(self, method: _Fills, x: Tensor, **kwargs: Any) -> Tensor:
        return self._fill(method, torch.empty_like(x, **kwargs))

    def _integers(self, *args: Any, **kwargs: Any) -> Tensor:
        numbers = list(args)
        size = kwargs.pop("size") if "size" in kwargs else numbers.pop()
        high = kwargs.pop("high") if "high" in kwargs else numbers.pop()
        low = kwargs.pop("low", numbers[0] if numbers else 0)
        generator = kwargs.pop("generator", None)
        return self._fill(
            Tensor.random_,
            torch.empty(size, **{"dtype": torch.int64, **kwargs}),
            low,
            high,
            generator=generator,
        )

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0 < p < 1 or not self._is_slice(input):
            return F.dropout(input, p, training, inplace)
        dropout_mask = self._fill(Tensor.bernoulli_, torch.empty_like(input), 1 - p).div_(1 - p)
        return input.mul_(dropout_mask) if inplace else input * dropout_mask
