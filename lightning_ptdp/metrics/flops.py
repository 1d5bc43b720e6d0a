"""Floating-point operations and parameters of a GPT: the paper's closed forms, and an exact count for every variant.

A multiply-add counts as 2 operations. Only matrix products are counted, and attention over the full s x s square, as the papers
do; a causal kernel that skips half of it looks faster by that much. "Model" operations are those that the mathematics needs
(forward + twice that for backward); "hardware" operations add the recomputed forward pass.
"""

from __future__ import annotations

__all__ = [
    "matmul_flops_per_token",
    "ptdp_parameters",
    "ptdp_step_flops",
    "ptdp_training_days",
    "training_flops_per_token",
]


def ptdp_parameters(*, num_layers: int, hidden_size: int, vocabulary_size: int, sequence_length: int) -> float:
    """Parameters of a GPT-2-like model: P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) (arXiv 2104.04473, section 5.1)."""
    layers, h = num_layers, hidden_size
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary_size + sequence_length) / (12 * layers * h))


def ptdp_step_flops(
    *,
    batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocabulary_size: int,
    recompute: bool = True,
) -> float:
    """Operations of one training step: F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) (arXiv 2104.04473, section 5.1).

    ``recompute=False`` is the count without recomputed activations (72 B s l h^2 in place of 96). The head's term
    6 B s h V is the same in both: its forward pass is never run twice.
    """
    layers, h, tokens = num_layers, hidden_size, batch_size * sequence_length
    blocks = (96 if recompute else 72) * tokens * layers * h**2 * (1 + sequence_length / (6 * h))
    return blocks + 6 * tokens * h * vocabulary_size


def ptdp_training_days(*, parameters: float, tokens: float, num_gpus: int, tflops_per_gpu: float) -> float:
    """Days to train with full recomputation: 8 T P / (n X) (arXiv 2104.04473, section 5.1)."""
    return 8 * tokens * parameters / (num_gpus * tflops_per_gpu * 1e12) / 86_400


def matmul_flops_per_token(
    *,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_hidden_size: int,
    gated: bool,
    vocabulary_size: int,
) -> tuple[int, int]:
    """Forward operations for one token: (all blocks, head); exact for GQA and SwiGLU (``gated``)."""
    h, head_dim = hidden_size, hidden_size // num_heads
    qkv = 2 * h * (num_heads + 2 * num_kv_heads) * head_dim
    scores_and_values = 2 * 2 * sequence_length * num_heads * head_dim
    projection = 2 * num_heads * head_dim * h
    mlp = 2 * (3 if gated else 2) * h * ffn_hidden_size
    return num_layers * (qkv + scores_and_values + projection + mlp), 2 * h * vocabulary_size


def training_flops_per_token(*, blocks: int, head: int, recompute: bool = False) -> int:
    """Forward and backward operations for one token, from ``matmul_flops_per_token``.

    Backward costs twice the forward pass. ``recompute`` adds the blocks' second forward pass: hardware operations. Divide
    model operations (``recompute=False``) by time and peak for the model FLOP utilization (MFU).
    """
    return (4 if recompute else 3) * blocks + 3 * head
