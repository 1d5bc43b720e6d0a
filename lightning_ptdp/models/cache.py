"""Keys and values of the tokens that attention has seen, so that the next one is computed alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Keys and values that a model's attentions keep between its forwards, one entry for each
    attention.

    Attributes:
        mask_b1qs: Which of the s tokens so far each of the q new ones sees, bool; ``begin`` makes
            it.
    """

    mask_b1qs: Tensor

    def __init__(self) -> None:
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, real_bs: Tensor, new: int) -> None:
        """A forward of the last ``new`` of s tokens comes; ``real_bs`` (b, s) bool is False for
        padding, which nobody sees but itself."""
        places = torch.arange(real_bs.size(1), device=real_bs.device)
        before, itself = places <= places[-new:, None], places == places[-new:, None]
        self.mask_b1qs = ((before & real_bs[:, None]) | itself)[:, None]

    def extend(self, attention: nn.Module, k_bsnd: Tensor, v_bsnd: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that ``attention`` has seen, with the new ones behind."""
        if attention in self._kept:
            earlier_k, earlier_v = self._kept[attention]
            k_bsnd, v_bsnd = (
                torch.cat((earlier_k, k_bsnd), dim=1),
                torch.cat((earlier_v, v_bsnd), dim=1),
            )
        self._kept[attention] = k_bsnd, v_bsnd
        return k_bsnd, v_bsnd
