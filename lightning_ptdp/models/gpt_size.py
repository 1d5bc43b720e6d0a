"""How large a GPT is, computed from its configuration alone."""

from __future__ import annotations

from lightning_ptdp.models.flops import matmul_flops_per_token, training_flops_per_token
from lightning_ptdp.models.gpt_config import GPTConfig

__all__ = [
    "flops_per_sample",
    "layer_matrices",
    "layer_parameters",
    "norm_parameters",
    "num_parameters",
    "position_parameters",
]


def layer_matrices(config: GPTConfig, t: int = 1) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer's matrices on one of ``t`` tensor-parallel ranks: qkv, projection, up, down. Of fewer key heads than
    ranks, every rank has one."""
    h, f, kv_heads = config.hidden_size, config.ffn_size // t, max(1, config.kv_heads // t)
    q = config.num_heads // t * config.head_dim
    return ((q + 2 * kv_heads * config.head_dim, h), (h, q), (f if config.mlp == "gelu" else 2 * f, h), (h, f))


def layer_parameters(config: GPTConfig, t: int = 1) -> int:
    """All parameters of one layer on one of ``t`` tensor-parallel ranks."""
    return 2 * norm_parameters(config) + sum(out * (width + config.bias) for out, width in layer_matrices(config, t))


def norm_parameters(config: GPTConfig) -> int:
    """Of one norm."""
    return 2 * config.hidden_size if config.norm == "layer" and config.bias else config.hidden_size


def position_parameters(config: GPTConfig) -> int:
    """Of the table of positions, if there is one."""
    return config.sequence_length * config.hidden_size if config.position == "learned" else 0


def num_parameters(config: GPTConfig) -> int:
    """Number of parameters, a tied head counted once; equals the module's exactly."""
    tables = config.vocabulary_size * config.hidden_size * (1 if config.tie_embeddings else 2) + position_parameters(config)
    return tables + config.num_layers * layer_parameters(config) + norm_parameters(config)


def flops_per_sample(config: GPTConfig, *, sequence_length: int | None = None, recompute: bool = False) -> int:
    """Operations of training on one sequence, forward and backward (see ``lightning_ptdp.models.flops``).

    Args:
        config: The model.
        sequence_length: s in tokens; None: the longest that the model takes.
        recompute: Count the blocks' recomputed forward pass too.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    blocks, head = matmul_flops_per_token(config, length, gated=config.mlp == "swiglu")
    return length * training_flops_per_token(blocks=blocks, head=head, recompute=recompute)
