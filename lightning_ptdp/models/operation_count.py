"""Number of training operations of any model, counted by a run without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptdp.shims.torch import without_data
from lightning_ptdp.tensor_parallel import Experts

__all__ = ["Operations", "count_once", "count_operations"]

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
        build: Function that builds the whole model, with its frozen parameters.
        run: Function that calls the model with a sample of a given number of tokens, and returns
            the tensor from which the loss is computed.
        longest: Number of tokens that the model accepts.
    """
    long = max(2, min(longest, _LONGEST))
    short = long // 2
    with without_data():
        few, many = (count_once(build, run, length) for length in (short, long))
    per_pair = (many / long - few / short) / (long - short)
    return Operations(per_token=few / short - short * per_pair, per_pair=per_pair)


def count_once(
    build: Callable[[], nn.Module], run: Callable[[nn.Module, int], Tensor], length: int
) -> int:
    """Count the operations of a sample of ``length`` tokens; arguments as in ``count_operations``.

    Attention counts as products of its own, because a fused backward computes one of them twice.
    """
    with torch.device("meta"):
        model = build()
    kind, of_experts = Experts(), list[int]()
    modules = [module for module in model.modules() if kind.fits(module)]

    def visited(module: nn.Module, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor) -> Tensor:
        """Replace the experts' forward by one with the same gradients, and count its products.

        It uses shapes only, because routing depends on values that fake tensors lack.
        """
        for parameter in module.parameters():
            if parameter.dim() > 2:  # not a bias
                passes = 1 + x_nh.requires_grad + parameter.requires_grad
                of_experts.append(2 * index_nk.numel() * parameter[0].numel() * passes)
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
    return int(counter.get_total_flops()) + sum(of_experts)
