"""Masks of attention: boolean (True: visible) or added to the scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["additive", "document_mask", "find_documents", "with_causal"]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers to add to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def with_causal(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask that also hides later keys; None: a mask that does only this."""
    past = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril_()
    if mask is None:
        return past
    return mask & past if mask.dtype is torch.bool else mask.masked_fill(~past, -torch.inf)


def find_documents(positions: Tensor) -> Tensor | None:
    """Return the document index of each token of packed sequences, (b, s) int64.

    A document begins where the positions (b, s) do not continue. The result is None if no sequence
    has more than one document. Reads a value back from the device.
    """
    begins = F.pad(positions.diff() != 1, (1, 0))
    return begins.cumsum(-1) if bool(begins.any()) else None


def document_mask(documents: Tensor, queries: Tensor) -> Tensor:
    """Return the causal mask within documents, (b, 1, q, s).

    Args:
        documents: Document index of each token, (b, s) int64.
        queries: Positions of the queries in the sequence, (q) int64.
    """
    past = queries[:, None] >= torch.arange(documents.size(1), device=queries.device)
    return (past & (documents[:, queries, None] == documents[:, None, :]))[:, None]
