"""Small models for the tests of context parallelism."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, HIDDEN = 29, 16


class Attention(nn.Module):
    """Self-attention of four heads that forwards mask arguments."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, **attention):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, **attention).transpose(1, 2).flatten(2)
        )


class Toy(nn.Module):
    """Two layers between an embedding and a head. ``recompute`` are options of activation
    checkpointing."""

    def __init__(self, *, recompute: Any = None, **attention: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.attention, self.recompute = attention, recompute

    def forward(self, input_ids, position_ids=None, mask=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1))
        x = self.tokens(input_ids) + self.places(position_ids)
        attention = self.attention if mask is None else {**self.attention, "attn_mask": mask}
        for block in self.blocks:
            x = (
                block(x, **attention)
                if self.recompute is None
                else checkpoint(partial(block, **attention), x, **self.recompute)
            )
        return self.head(x)


class Encoder(nn.Module):
    """torch's ``nn.TransformerEncoder`` with embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids, position_ids=None, **masks):
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1))
        return self.encoder(self.tokens(input_ids) + self.places(position_ids), **masks)


def local_causal_mask(length: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the causal mask that a model builds from the length of its local sequence."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return (
        seen
        if dtype is None
        else torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    )
