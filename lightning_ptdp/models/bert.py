"""BERT: a bidirectional encoder with its two pretraining heads, in the order of data flow.

This is a plain single-device model without process groups or parallel degrees. It follows the rules
of ``gpt.py`` that make it divisible from outside (``bert_plan``), and one more: besides the hidden
state, a block receives only the attention mask. Every pipeline stage computes the mask from its
batch, so that only the hidden state passes between stages.

Shapes: b samples, s tokens, h hidden channels, n heads, d channels of a head, f inner channels, V
vocabulary, k predicted positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.models.layers import (
    Attention,
    GeluMLP,
    TiedLinear,
    Transformer,
    make_embedding,
    make_linear,
    positions_of,
)
from lightning_ptdp.models.model_config import BertConfig
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, Position, Row, Vocabulary


class BertOutput(NamedTuple):
    """Logits of both heads.

    Attributes:
        masked: Logits of the original tokens (b, s, V), or (b, k, V) at the requested positions.
            Without ``logits``, the input of the decoder, (b, s, h) or (b, k, h).
        order: Logits of the pair (b, 2). Index 0 is "the second follows the first", 1 is "it does
            not".
    """

    masked: Tensor
    order: Tensor


class Bert(Transformer):
    """BERT with both heads: token ids (b, s) int64 -> ``BertOutput``.

    Args:
        config: Sizes and choices.

    Raises:
        ValueError: (in the forward pass) the sequence is longer than ``config.sequence_length``.
    """

    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.num_layers))
        self.norm = make_norm(config) if config.norm_order == "pre" else None
        self.masked_head = MaskedHead(config, self.embeddings.token.weight)
        self.order_head = OrderHead(config)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        logits: bool = True,
    ) -> BertOutput:
        """Return the logits of both heads.

        Args:
            input_ids: Tokens (b, s) int64; the first one is [CLS].
            token_type_ids: Segment of each token (b, s) int64; None: all in segment 0.
            attention_mask: Nonzero for tokens, 0 for padding (b, s), of any integer type or bool;
                None: no padding.
            masked_positions: Positions of the tokens to predict (b, k) int64; None: all positions.
                The head costs k/s of its cost for all positions.
            position_ids: Positions of the tokens in their sequence (s), (1, s) or (b, s) int64;
                None: 0 .. s-1.
            logits: False for a loss that calls the decoder (``linear_cross_entropy``).
        """
        self.check_sequence_length(input_ids.size(1))
        mask_b11s = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x_bsh = self.embeddings(input_ids, token_type_ids, position_ids)
        for block in self.blocks:
            x_bsh = block(x_bsh, mask_b11s)
        if self.norm is not None:
            x_bsh = self.norm(x_bsh)
        return BertOutput(
            masked=self.masked_head(x_bsh, masked_positions, logits=logits),
            order=self.order_head(x_bsh),
        )


class BertEmbeddings(nn.Module):
    """Sum of token, position and segment embeddings; (b, s) -> (b, s, h).

    The sum is normalized if ``norm_order`` is "post".
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.token = make_embedding(config, config.vocabulary_size)
        self.position = make_embedding(config, config.sequence_length)
        self.segment = make_embedding(config, config.num_segments)
        self.norm = make_norm(config) if config.norm_order == "post" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        positions = positions_of(input_ids, position_ids)
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x_bsh = self.token(input_ids) + self.position(positions) + self.segment(segments)
        return self.dropout(x_bsh if self.norm is None else self.norm(x_bsh))


class BertBlock(nn.Module):
    """Attention and feed-forward part with residual sums; (b, s, h) -> (b, s, h).

    LayerNorm follows each sum ("post") or precedes each part ("pre").
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.is_pre = config.norm_order == "pre"
        self.norm_1 = make_norm(config)
        self.attention = Attention(config, is_causal=False)
        self.norm_2 = make_norm(config)
        self.mlp = GeluMLP(config, approximate=gelu_name(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_bsh: Tensor, mask_b11s: Tensor | None = None) -> Tensor:
        if self.is_pre:
            x_bsh = x_bsh + self.dropout(self.attention(self.norm_1(x_bsh), mask_b1qs=mask_b11s))
            return x_bsh + self.dropout(self.mlp(self.norm_2(x_bsh)))
        x_bsh = self.norm_1(x_bsh + self.dropout(self.attention(x_bsh, mask_b1qs=mask_b11s)))
        return self.norm_2(x_bsh + self.dropout(self.mlp(x_bsh)))


class MaskedHead(nn.Module):
    """Logits of the original tokens: norm(gelu(dense(x))), decoded by the token embedding.

    The decoder has a bias. (b, s, h) -> (b, s, V), or (b, k, V) at the positions (b, k). Without
    ``logits``, the result is the input of the decoder.
    """

    def __init__(self, config: BertConfig, weight: Tensor) -> None:
        super().__init__()
        self.dense = make_linear(config, config.hidden_size)
        self.norm = make_norm(config)
        self.decoder = TiedLinear(weight, bias=True)
        self.approximate = gelu_name(config)

    def forward(
        self, x_bsh: Tensor, positions_bk: Tensor | None = None, *, logits: bool = True
    ) -> Tensor:
        if positions_bk is not None:
            x_bsh = x_bsh.gather(1, positions_bk[..., None].expand(-1, -1, x_bsh.size(-1)))
        x_bsh = self.norm(F.gelu(self.dense(x_bsh), approximate=self.approximate))
        return self.decoder(x_bsh) if logits else x_bsh


class OrderHead(nn.Module):
    """Logits of "the second sentence follows the first" and "it does not".

    They are computed from the first token; (b, s, h) -> (b, 2).
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pooler = make_linear(config, config.hidden_size)
        self.classifier = make_linear(config, 2)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(x_bsh[:, 0])))


def make_norm(config: BertConfig) -> nn.LayerNorm:
    """Return a LayerNorm over the hidden channels."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def gelu_name(config: BertConfig) -> str:
    """Return the name in ``F.gelu`` of the configured variant."""
    return "tanh" if config.gelu == "tanh" else "none"


# ---- Plan of the model, as that of GPT -----------------------------------------------------------


def bert_plan(config: BertConfig, prefix: str = "model") -> ParallelPlan:
    """Return the plan of a ``Bert(config)`` with the name ``prefix`` ("" if it is the root).

    Sequence parallelism splits the sequence only within the blocks. The sentence head reads the
    first token, which is in one rank's slice, and the masked-LM head takes tokens from all
    positions.
    """
    root = f"{prefix}." if prefix else ""
    block = f"{root}blocks.*"
    h = config.hidden_size
    n = config.num_heads
    tensor: dict[str, Kind] = {
        f"{root}embeddings.token": Vocabulary(),
        f"{root}embeddings.position": Position(),
        f"{block}.attention.qkv": Column(parts=(h, h, h), heads=(n, n, n)),
        f"{block}.attention.projection": Row(),
        f"{block}.mlp.up": Column(),
        f"{block}.mlp.down": Row(),
        f"{root}masked_head.decoder": Vocabulary(),
    }
    norm = (f"{root}norm",) if config.norm_order == "pre" else ()
    return ParallelPlan(
        blocks=f"{root}blocks",
        tensor=tensor,
        before=(f"{root}embeddings",),
        after=(*norm, f"{root}masked_head", f"{root}order_head"),
        selective=(f"{block}.attention.core",),
        sequence="blocks",
    )
