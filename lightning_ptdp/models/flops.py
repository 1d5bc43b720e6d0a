"""Floating-point operations of a GPT, exactly, for every variant.

A multiply-add counts as 2 operations. Only matrix products are counted, and attention over the full s x s square, as the papers
do; a causal kernel that skips half of it looks faster by that much. "Model" operations are those that the mathematics needs
(forward + twice that for backward); "hardware" operations add the recomputed forward pass.
"""

from __future__ import annotations

from lightning_ptdp.models.config import TransformerConfig

__all__ = [
    "matmul_flops_per_token",
    "training_flops_per_token",
]


def matmul_flops_per_token(config: TransformerConfig, sequence_length: int, *, gated: bool = False) -> tuple[int, int]:
    """Forward operations for one token: (all blocks, head); exact for GQA and SwiGLU (``gated``)."""
    h, head_dim = config.hidden_size, config.head_dim
    qkv = 2 * h * (config.num_heads + 2 * config.kv_heads) * head_dim
    scores_and_values = 2 * 2 * sequence_length * config.num_heads * head_dim
    projection = 2 * config.num_heads * head_dim * h
    mlp = 2 * (3 if gated else 2) * h * config.ffn_size
    return config.num_layers * (qkv + scores_and_values + projection + mlp), 2 * h * config.vocabulary_size


def training_flops_per_token(*, blocks: int, head: int, recompute: bool = False) -> int:
    """Forward and backward operations for one token, from ``matmul_flops_per_token``.

    Backward costs twice the forward pass. ``recompute`` adds the blocks' second forward pass: hardware operations. Divide
    model operations (``recompute=False``) by time and peak for the model FLOP utilization (MFU).
    """
    return (4 if recompute else 3) * blocks + 3 * head
