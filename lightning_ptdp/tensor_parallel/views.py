"""Which views and indices of logits (..., V) leave the last dimension, the vocabulary, whole and last."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["keeps_vocabulary", "leading_sizes"]


def leading_sizes(shape: tuple[int, ...], *, rows: int, vocabulary: int) -> tuple[int, ...] | None:
    """Sizes before the last of a view that keeps the vocabulary as its last dimension; None if it does not."""
    if not shape or shape.count(-1) > 1:
        return None
    leading, last = shape[:-1], shape[-1]
    known = math.prod(size for size in leading if size != -1)
    if last == -1:
        return leading if known == rows else None
    if last != vocabulary:
        return None
    if -1 in leading:
        if known == 0 or rows % known:
            return None
        return tuple(rows // known if size == -1 else size for size in leading)
    return leading if known == rows else None


def keeps_vocabulary(index: tuple, dims: int) -> bool:
    """Whether indexing leaves the last dimension whole and last. Once the ellipsis is written out, the last item must be ``:``."""
    consumed, ellipses = 0, 0
    for item in index:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            if item.dim() == 0:
                return False
            consumed += item.dim()
        elif isinstance(item, Tensor | slice) or (isinstance(item, int) and not isinstance(item, bool)):
            consumed += 1
        elif item is Ellipsis:
            ellipses += 1
        elif item is not None:
            return False  # lists, arrays, Python booleans: seldom on logits, and not worth telling apart
    if consumed < dims and (not ellipses or index[-1] is Ellipsis):
        return ellipses <= 1
    last = index[-1] if index[-1] is not Ellipsis else index[-2]
    return ellipses <= 1 and isinstance(last, slice) and last == slice(None)
