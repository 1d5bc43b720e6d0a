"""Parameters and operations of a GPT or a BERT, counted in a model without data.

A multiply-add counts as 2 operations. Only matrix products are counted, and attention over the full
s x s square, as in the papers. A causal kernel that skips half of it therefore appears faster by
that amount. "Model" operations are those that the mathematics needs (forward + twice that for
backward). "Hardware" operations add the recomputed forward pass.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.models.operation_count import count_once

__all__ = [
    "active_parameters",
    "bert_flops_per_sample",
    "flops_per_sample",
    "num_parameters",
]

_PREDICTED_SHARE = 0.15
"""Share of the tokens that is predicted (arXiv 1810.04805, section 3.1)."""


def num_parameters(config: GPTConfig | BertConfig) -> int:
    """Return the number of parameters, with a tied head counted once."""
    return sum(parameter.numel() for parameter in _built(config).parameters())


def active_parameters(config: GPTConfig) -> int:
    """Return the number of parameters that one token visits.

    Of a layer's experts, these are the chosen and the shared ones.
    """
    resting = config.layers_with_experts * ((config.num_experts or 0) - config.experts_per_token)
    return num_parameters(config) - resting * 3 * config.expert_size * config.hidden_size


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
    model = _operations(config, length)
    head = 2 * length * config.hidden_size * config.vocabulary_size
    return model + recompute * (model // 3 - head)


@cache
def bert_flops_per_sample(
    config: BertConfig, *, sequence_length: int | None = None, predictions: int | None = None
) -> int:
    """Return the operations of training on one sequence, forward and backward.

    The module's docstring defines an operation. With ``predictions=sequence_length``, blocks and
    decoder cost as much as a GPT by the formula of arXiv 2104.04473, section 5.1 (attention covers
    the full square in both). The square matrices of the heads are added to that.

    Args:
        config: Configuration of the model.
        sequence_length: s in tokens; None: the longest sequence that the model accepts.
        predictions: Positions at which the decoder runs; None: 15 % of the sequence.
    """
    length = config.sequence_length if sequence_length is None else sequence_length
    count = max(1, round(_PREDICTED_SHARE * length)) if predictions is None else predictions

    def run(model: nn.Module, length: int) -> Tensor:
        ids = torch.zeros(1, length, dtype=torch.long)
        output = model(ids, masked_positions=ids.new_zeros(1, count))
        return torch.cat((output.masked.flatten(), output.order.flatten()))

    return count_once(lambda: _built(config), run, length)


@cache
def _operations(config: GPTConfig, length: int) -> int:
    def run(model: nn.Module, length: int) -> Tensor:
        logits: Tensor = model(torch.zeros(1, length, dtype=torch.long))
        return logits

    return count_once(lambda: _built(config), run, length)


def _built(config: GPTConfig | BertConfig) -> nn.Module:
    with torch.device("meta"):
        # Experts drop no tokens in evaluation.
        return (GPT(config) if isinstance(config, GPTConfig) else Bert(config)).eval()
