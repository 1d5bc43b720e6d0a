"""How large a BERT is, computed from its configuration alone."""

from __future__ import annotations

from lightning_ptdp.models.bert_config import BertConfig
from lightning_ptdp.models.flops import matmul_flops_per_token, training_flops_per_token

__all__ = ["bert_flops_per_sample", "num_bert_parameters"]

_PREDICTED_SHARE = 0.15
"""Of the tokens (arXiv 1810.04805, section 3.1)."""


def num_bert_parameters(config: BertConfig) -> int:
    """Number of parameters, both heads included and the tied decoder's weight counted once; equals the module's exactly."""
    h, f, v = config.hidden_size, config.ffn_size, config.vocabulary_size
    embeddings = (v + config.sequence_length + config.num_segments) * h
    attention, mlp, norm = 4 * h * h + 4 * h, 2 * h * f + f + h, 2 * h
    masked_head, order_head = h * h + h + norm + v, h * h + h + 2 * h + 2
    # One norm more: behind the embeddings (post) or behind the blocks (pre).
    return embeddings + config.num_layers * (attention + mlp + 2 * norm) + norm + masked_head + order_head


def bert_flops_per_sample(
    config: BertConfig, *, sequence_length: int | None = None, predictions: int | None = None, recompute: bool = False
) -> int:
    """Operations of training on one sequence, forward and backward (see ``lightning_ptdp.models.flops``).

    With ``predictions=sequence_length`` the blocks and the decoder cost what the formula of arXiv 2104.04473, section 5.1, says of a
    GPT (attention covers the full square in both); the heads' square matrices come on top.

    Args:
        config: The model.
        sequence_length: s in tokens; None: the longest that the model takes.
        predictions: Positions at which the decoder runs; None: 15 % of the sequence.
        recompute: Count the blocks' recomputed forward pass too.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    count = max(1, round(_PREDICTED_SHARE * length)) if predictions is None else predictions
    blocks, decoder = matmul_flops_per_token(config, length)
    square = 2 * config.hidden_size**2
    heads = count * (decoder + square) + square + 4 * config.hidden_size
    return length * training_flops_per_token(blocks=blocks, head=0, recompute=recompute) + 3 * heads
