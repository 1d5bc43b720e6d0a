"""Cache of keys and values, so that generation computes only the newest token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Keys and values that attentions keep between forwards, one entry per attention.

    Attributes:
        mask_b1qs: Mask of the s tokens so far that each of the q new tokens sees, bool; ``begin``
            sets it.
    """

    mask_b1qs: Tensor

    def __init__(self) -> None:
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, real_bs: Tensor, new: int) -> None:
        """Prepare a forward of the last ``new`` of s tokens.

        ``real_bs`` (b, s) bool is False for padding. A padding token is visible only to itself.
        """
        places = torch.arange(real_bs.size(1), device=real_bs.device)
        before, itself = places <= places[-new:, None], places == places[-new:, None]
        self.mask_b1qs = ((before & real_bs[:, None]) | itself)[:, None]

    def extend(self, attention: nn.Module, k_bsnd: Tensor, v_bsnd: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values, and return all that ``attention`` has seen."""
        if attention in self._kept:
            earlier_k, earlier_v = self._kept[attention]
            k_bsnd, v_bsnd = (
                torch.cat((earlier_k, k_bsnd), dim=1),
                torch.cat((earlier_v, v_bsnd), dim=1),
            )
        self._kept[attention] = k_bsnd, v_bsnd
        return k_bsnd, v_bsnd
