"""Parameters and operations of a GPT or a BERT, computed from its configuration alone.

A multiply-add counts as 2 operations. Only matrix products are counted, and attention over the full
s x s square, as in the papers. A causal kernel that skips half of it therefore appears faster by
that amount. "Model" operations are those that the mathematics needs (forward + twice that for
backward). "Hardware" operations add the recomputed forward pass.
"""

from __future__ import annotations

from lightning_ptdp.models.model_config import BertConfig, GPTConfig, TransformerConfig

__all__ = [
    "active_parameters",
    "bert_flops_per_sample",
    "expert_parameters",
    "flops_per_sample",
    "layer_matrices",
    "layer_parameters",
    "norm_parameters",
    "num_bert_parameters",
    "num_parameters",
    "position_parameters",
]

_PREDICTED_SHARE = 0.15
"""Share of the tokens that is predicted (arXiv 1810.04805, section 3.1)."""


def layer_matrices(
    config: GPTConfig, t: int = 1, *, mixture: bool = False
) -> tuple[tuple[int, int], ...]:
    """Return (outputs, inputs) of a layer's matrices on one of ``t`` tensor-parallel ranks.

    The matrices are qkv, projection, up and down. If there are fewer key heads than ranks, every
    rank has one. Up and down of a ``mixture`` are those of the shared experts, with width 0 if
    there are none.
    """
    h, kv_heads = config.hidden_size, max(1, config.kv_heads // t)
    f = (config.shared_experts * config.expert_size if mixture else config.ffn_size) // t
    q = config.num_heads // t * config.head_dim
    return (
        (q + 2 * kv_heads * config.head_dim, h),
        (h, q),
        (f if config.mlp == "gelu" else 2 * f, h),
        (h, f),
    )


def layer_parameters(config: GPTConfig, t: int = 1, *, mixture: bool = False) -> int:
    """Return the number of parameters of one layer on one of ``t`` tensor-parallel ranks.

    The number for a ``mixture`` does not include the experts from which the router chooses.
    """
    matrices = layer_matrices(config, t, mixture=mixture)
    router = (config.num_experts or 0) * config.hidden_size if mixture else 0
    return (
        2 * norm_parameters(config)
        + router
        + sum(out * (width + config.bias) for out, width in matrices if width)
    )


def expert_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of one expert."""
    return 3 * config.expert_size * config.hidden_size


def norm_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of one norm."""
    return 2 * config.hidden_size if config.norm == "layer" and config.bias else config.hidden_size


def position_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of the table of positions, if there is one."""
    return config.sequence_length * config.hidden_size if config.position == "learned" else 0


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters, with a tied head counted once.

    It equals that of the module exactly.
    """
    return _parameters(config, experts=config.num_experts or 0)


def active_parameters(config: GPTConfig) -> int:
    """Return the number of parameters that one token visits.

    Of a layer's experts, these are the chosen and the shared ones.
    """
    return _parameters(config, experts=config.experts_per_token)


def _parameters(config: GPTConfig, *, experts: int) -> int:
    """Count parameters with ``experts`` experts, beside the shared ones, in each mixture."""
    tables = config.vocabulary_size * config.hidden_size * (
        1 if config.tie_embeddings else 2
    ) + position_parameters(config)
    mixtures = config.layers_with_experts
    mixture = layer_parameters(config, mixture=True) + experts * expert_parameters(config)
    dense = (config.num_layers - mixtures) * layer_parameters(config) + norm_parameters(config)
    return tables + dense + mixtures * mixture


def flops_per_sample(
    config: GPTConfig, *, sequence_length: int | None = None, recompute: bool = False
) -> int:
    """Return the operations of training on one sequence, forward and backward.

    Only experts that a token visits count. The module's docstring defines an operation.

    Args:
        config: Configuration of the model.
        sequence_length: s in tokens; None: the longest sequence that the model accepts.
        recompute: Count the blocks' recomputed forward pass too.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    blocks, head = _matmul_flops_per_token(config, length, gated=config.mlp == "swiglu")
    visited = (config.experts_per_token + config.shared_experts) * expert_parameters(config)
    router = (config.num_experts or 0) * config.hidden_size
    blocks += (
        2
        * config.layers_with_experts
        * (router + visited - 3 * config.hidden_size * config.ffn_size)
    )
    return length * _training_flops_per_token(blocks=blocks, head=head, recompute=recompute)


def num_bert_parameters(config: BertConfig) -> int:
    """Return the number of parameters, including both heads.

    The weight of the tied decoder is counted once. The number equals that of the module exactly.
    """
    h, f, v = config.hidden_size, config.ffn_size, config.vocabulary_size
    embeddings = (v + config.sequence_length + config.num_segments) * h
    attention, mlp, norm = 4 * h * h + 4 * h, 2 * h * f + f + h, 2 * h
    masked_head, order_head = h * h + h + norm + v, h * h + h + 2 * h + 2
    # One additional norm: after the embeddings (post) or after the blocks (pre).
    return (
        embeddings
        + config.num_layers * (attention + mlp + 2 * norm)
        + norm
        + masked_head
        + order_head
    )


def bert_flops_per_sample(
    config: BertConfig,
    *,
    sequence_length: int | None = None,
    predictions: int | None = None,
    recompute: bool = False,
) -> int:
    """Return the operations of training on one sequence, forward and backward.

    The module's docstring defines an operation. With ``predictions=sequence_length``, blocks and
    decoder cost as much as a GPT by the formula of arXiv 2104.04473, section 5.1 (attention covers
    the full square in both). The square matrices of the heads are added to that.

    Args:
        config: Configuration of the model.
        sequence_length: s in tokens; None: the longest sequence that the model accepts.
        predictions: Positions at which the decoder runs; None: 15 % of the sequence.
        recompute: Count the blocks' recomputed forward pass too.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    count = max(1, round(_PREDICTED_SHARE * length)) if predictions is None else predictions
    blocks, decoder = _matmul_flops_per_token(config, length)
    square = 2 * config.hidden_size**2
    heads = count * (decoder + square) + square + 4 * config.hidden_size
    return (
        length * _training_flops_per_token(blocks=blocks, head=0, recompute=recompute) + 3 * heads
    )


def _matmul_flops_per_token(
    config: TransformerConfig, sequence_length: int, *, gated: bool = False
) -> tuple[int, int]:
    """Return the forward operations for one token: (all blocks, head).

    They are exact for GQA and SwiGLU (``gated``).
    """
    h, head_dim = config.hidden_size, config.head_dim
    qkv = 2 * h * (config.num_heads + 2 * config.kv_heads) * head_dim
    scores_and_values = 2 * 2 * sequence_length * config.num_heads * head_dim
    projection = 2 * config.num_heads * head_dim * h
    mlp = 2 * (3 if gated else 2) * h * config.ffn_size
    return config.num_layers * (
        qkv + scores_and_values + projection + mlp
    ), 2 * h * config.vocabulary_size


def _training_flops_per_token(*, blocks: int, head: int, recompute: bool = False) -> int:
    """Return forward and backward operations for one token, from ``_matmul_flops_per_token``.

    The backward pass costs twice the forward pass. ``recompute`` adds the blocks' second forward
    pass: hardware operations. The model FLOP utilization (MFU) is the number of model operations
    (``recompute=False``) divided by time and peak.
    """
    return (4 if recompute else 3) * blocks + 3 * head
