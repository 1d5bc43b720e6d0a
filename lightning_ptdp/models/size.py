"""Parameters and operations of a model, counted without data.

A multiply-add counts as 2 operations. Only matrix products are counted, and attention over the full
s x s square, as in the papers. A causal kernel that skips half of it therefore appears faster by
that amount. "Model" operations are those that the mathematics needs (forward + twice that for
backward). "Hardware" operations add the recomputed forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.shims.torch import without_data
from lightning_ptdp.tensor_parallel import Experts

_PREDICTED_SHARE = 0.15
"""Share of the tokens that is predicted (arXiv 1810.04805, section 3.1)."""


def num_parameters(config: GPTConfig | BertConfig) -> int:
    """Return the number of parameters, with a tied head counted once."""
    return sum(parameter.numel() for parameter in _built(config).parameters())


def active_parameters(config: GPTConfig) -> int:
    """Return the number of parameters that one token visits.

    Of a layer's experts, these are the chosen and the shared ones.
    """
    inactive = config.layers_with_experts * ((config.num_experts or 0) - config.experts_per_token)
    return num_parameters(config) - inactive * 3 * config.expert_size * config.hidden_size


@cache
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

    def run(model: nn.Module, length: int) -> Tensor:
        return model(torch.zeros(1, length, dtype=torch.long))

    operations = count_once(lambda: _built(config), run, length)
    head = 2 * length * config.hidden_size * config.vocabulary_size
    return operations + recompute * (operations // 3 - head)


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
        masked, order = model(ids, masked_positions=ids.new_zeros(1, count))
        return torch.cat((masked.flatten(), order.flatten()))

    return count_once(lambda: _built(config), run, length)


def _built(config: GPTConfig | BertConfig) -> nn.Module:
    with torch.device("meta"):
        # Experts drop no tokens in evaluation.
        return (GPT(config) if isinstance(config, GPTConfig) else Bert(config)).eval()


# ---- Number of training operations of any model, counted by a run without data -------------------


_LONGEST = 128


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of the matrix products in a sample's forward and backward.

    They are a function of the length of the sample.

    Attributes:
        per_token: Operations of every matrix; of experts, only of those that a token visits.
        per_pair: Operations of attention, over all pairs of tokens.
    """

    per_token: float
    per_pair: float

    def of(self, length: int) -> int:
        """Return the operations of a sample of ``length`` tokens."""
        return round(length * (self.per_token + self.per_pair * length))


def count_operations(
    build: Callable[[], nn.Module], run: Callable[[nn.Module, int], Tensor], *, longest: int
) -> Operations:
    """Count operations with two short samples, and extrapolate to any length.

    This also works for a layer that goes through the sequence step by step.

    Args:
        build: Function that builds the full model, with its frozen parameters.
        run: Function that calls the model with a sample of a given number of tokens, and returns
            the tensor from which the loss is computed.
        longest: Number of tokens that the model accepts.
    """
    long = max(2, min(longest, _LONGEST))
    short = long // 2
    with without_data():
        short_count, long_count = (count_once(build, run, length) for length in (short, long))
    per_pair = (long_count / long - short_count / short) / (long - short)
    return Operations(per_token=short_count / short - short * per_pair, per_pair=per_pair)


def count_once(
    build: Callable[[], nn.Module], run: Callable[[nn.Module, int], Tensor], length: int
) -> int:
    """Count the operations of a sample of ``length`` tokens; arguments as in ``count_operations``.

    Attention counts as products of its own, because a fused backward computes one of them twice.
    """
    with torch.device("meta"):
        model = build()
    kind = Experts()
    expert_flops = list[int]()
    modules = [module for module in model.modules() if kind.fits(module)]

    def visited(
        module: nn.Module, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor, **_: object
    ) -> Tensor:
        """Replace the experts' forward by one with the same gradients, and count its products.

        It uses shapes only, because routing depends on values that fake tensors lack.
        """
        for parameter in module.parameters():
            if parameter.dim() > 2:  # not a bias
                passes = 1 + x_nh.requires_grad + parameter.requires_grad
                expert_flops.append(2 * index_nk.numel() * parameter[0].numel() * passes)
        return x_nh * weights_nk.sum(-1, keepdim=True).to(x_nh.dtype)

    for module in modules:
        vars(module)["forward"] = visited.__get__(module)
    with (
        torch.device("meta"),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        torch.enable_grad(),
    ):
        run(model, length).sum().backward()
    return int(counter.get_total_flops()) + sum(expert_flops)
