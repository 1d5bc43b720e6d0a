"""How large a GPT is, computed from its configuration alone."""

from __future__ import annotations

from lightning_ptdp.models.flops import matmul_flops_per_token, training_flops_per_token
from lightning_ptdp.models.gpt_config import GPTConfig

__all__ = ["flops_per_sample", "num_parameters"]


def num_parameters(config: GPTConfig) -> int:
    """Number of parameters, a tied head counted once; equals the module's exactly."""
    h, f = config.hidden_size, config.ffn_size
    qkv = (config.num_heads + 2 * config.kv_heads) * config.head_dim
    up = f if config.mlp == "gelu" else 2 * f
    matrices = h * qkv + h * h + h * up + f * h
    biases = qkv + h + up + h if config.bias else 0
    norm = 2 * h if config.norm == "layer" and config.bias else h
    positions = config.sequence_length * h if config.position == "learned" else 0
    embeddings = config.vocabulary_size * h * (1 if config.tie_embeddings else 2) + positions
    return embeddings + config.num_layers * (matrices + biases + 2 * norm) + norm


def flops_per_sample(config: GPTConfig, *, sequence_length: int | None = None, recompute: bool = False) -> int:
    """Operations of training on one sequence, forward and backward (see ``lightning_ptdp.models.flops``).

    Args:
        config: The model.
        sequence_length: s in tokens; None: the longest that the model takes.
        recompute: Count the blocks' recomputed forward pass too.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    blocks, head = matmul_flops_per_token(
        sequence_length=length,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        ffn_hidden_size=config.ffn_size,
        gated=config.mlp == "swiglu",
        vocabulary_size=config.vocabulary_size,
    )
    return length * training_flops_per_token(blocks=blocks, head=head, recompute=recompute)
