"""The feed-forward part of a layer as a mixture of experts.

It consists of a router, the experts, and a shared part that every token visits.

Three numbers per sequence are passed from layer to layer together with the tokens, and summed over
the layers (``aux_b3``). They are thus available where the loss is computed:

- balance: E sum_i f_i P_i (arXiv 2101.03961, section 2.2), per sequence (arXiv 2412.19437, section
  2.1.2). f_i is the share of the sequence's choices that fell on expert i. P_i is the mean over its
  tokens of the score of i, as a share of all experts' scores. The value is 1 if all experts are
  equally busy.
- z: mean of logsumexp(logits)^2 over the tokens of the sequence (arXiv 2202.08906, section 3.2).
- dropped: share of the sequence's choices that exceeded the capacity of an expert.

Shapes: b samples, s tokens, h hidden channels, E experts, k experts per token, f inner channels of
an expert, n = b s tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.expert_parallel import dispatch, usual_output
from lightning_ptdp.forward.matrix_product import StepCasts, autocast_dtype
from lightning_ptdp.models.layers import NormalLinear
from lightning_ptdp.models.memory_saving import swiglu
from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.world.mesh import Group

AUXILIARY = 3
"""Number of auxiliary values per sequence."""


class ExpertWeights(nn.Module):
    """All experts of a layer.

    They are stored and called like the experts of Hugging Face models, and have the same
    descriptive attributes (``has_gate``, …).
    """

    has_gate = is_concatenated = True
    has_bias = is_transposed = False
    _apply_gate = staticmethod(swiglu)

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.layer = layer
        self.num_experts = config.num_experts
        h = config.hidden_size
        f = config.expert_size
        self.std = config.init_std
        self.std_down = config.residual_std
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * f, h))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, h, f))
        self.step_casts = StepCasts()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.std_down)

    def forward(
        self, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor, *, kept_nk: Tensor | None = None
    ) -> Tensor:
        """Return for each token the weighted sum of its experts' outputs, (n, h).

        ``index_nk`` is int64. Choices that are not ``kept_nk`` (bool) add nothing.

        Raises:
            ExpertError: A weight is NaN or infinite, or an expert does not exist.
        """
        routed = dispatch(
            x_nh,
            index_nk,
            weights_nk,
            num_experts=self.num_experts,
            group=Group(),
            router=lambda: f"layer {self.layer}",
            kept_nk=kept_nk,
        )
        outputs_rh = usual_output(self, routed, dtype=autocast_dtype(routed.rows_rh))
        return routed.combine(outputs_rh, weights_nk)


class Balancer(nn.Module):
    """Bias per expert, added to its scores for the choice of experts (arXiv 2408.15664).

    Attributes:
        bias_nano: (E,) int64, in units of 1e-9. Floating-point values would lose small steps in a
            model that is cast to bfloat16.
        load: (E,) int64, choices since the last ``move``, counted in the backward pass. Recomputed
            forwards therefore count once, and evaluation does not count. None if nothing has been
            counted. It is not a buffer, because replicas receive the buffers of the first one.
    """

    bias_nano: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.step_nano = round(rate * 1e9)
        self.register_buffer("bias_nano", torch.zeros(num_experts, dtype=torch.int64))
        self.load: Tensor | None = None

    def reset_parameters(self) -> None:
        """Reset the bias to zero."""
        self.bias_nano.zero_()
        self.load = None

    def forward(self, scores: Tensor) -> Tensor:
        """Add the bias to scores, (..., E) -> (..., E)."""
        return scores + (self.bias_nano.double() * 1e-9).to(scores.dtype)

    def counted(self, weights: Tensor, index: Tensor) -> Tensor:
        """Return ``weights``, whose backward adds the chosen experts ``index`` to the load."""
        if self.load is None or self.load.device != self.bias_nano.device:
            self.load = torch.zeros_like(self.bias_nano)
        chosen = index.flatten()
        counts = torch.zeros_like(self.load).scatter_add_(0, chosen, torch.ones_like(chosen))
        return _Counted.apply(weights, counts, self.load)

    def move(self, load: Tensor) -> None:
        """Move the bias against the load of a whole step, and reset the count.

        ``load`` is (E,) float64, the number of choices of each expert in any unit.
        """
        excess = load.numel() * load / load.sum() - 1
        self.bias_nano -= self.step_nano * excess.mul(1e9).round().sign().nan_to_num().to(
            torch.int64
        )
        if self.load is not None:
            self.load.zero_()


class _Counted(torch.autograd.Function):
    """Identity whose backward adds ``counts`` to ``total``.

    The backward pass runs once, even if the forward pass is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.total += ctx.saved_tensors[0]
        return grad, None, None


def within_capacity(index_bsk: Tensor, *, num_experts: int, factor: float) -> Tensor:
    """Return a mask of the choices that are kept, (b, s, k) bool.

    Of the choices of one sequence, an expert takes the first ``ceil(factor k s / E)``.
    """
    chosen, order = index_bsk.flatten(1).sort(dim=1, stable=True)
    counts = chosen.new_zeros(chosen.size(0), num_experts).scatter_add_(
        1, chosen, torch.ones_like(chosen)
    )
    first = (counts.cumsum(1) - counts).gather(1, chosen)
    position = torch.arange(chosen.size(1), device=chosen.device) - first
    kept = position < math.ceil(factor * chosen.size(1) / num_experts)
    return torch.empty_like(kept).scatter_(1, order, kept).view_as(index_bsk)


class Routing(NamedTuple):
    """Decision of a router.

    Attributes:
        experts: (b, s, k) int64, chosen experts of each token.
        weights: (b, s, k), weights of their outputs; at least float32.
        kept: (b, s, k) bool, mask of the choices that are kept; None: all.
        aux_b3: Balance, z and dropped share of each sequence; at least float32.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    aux_b3: Tensor


class Router(nn.Module):
    """Choice of experts for each token; (b, s, h) -> ``Routing``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.num_experts = config.num_experts
        self.top_k = config.experts_per_token
        self.gate = NormalLinear(
            config.hidden_size, config.num_experts, bias=False, std=config.init_std
        )
        self.balancer = (
            Balancer(config.num_experts, config.bias_rate) if config.balance == "bias" else None
        )

    def forward(self, x_bsh: Tensor) -> Routing:
        config = self.config
        logits = self.gate(x_bsh)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if config.router_score == "softmax" else logits.sigmoid()
        decisive = scores.detach() if self.balancer is None else self.balancer(scores.detach())
        index = decisive.topk(self.top_k, -1).indices
        weights = scores.gather(-1, index)
        if config.experts_per_token > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp(
                min=torch.finfo(weights.dtype).tiny
            )
        if self.balancer is not None and torch.is_grad_enabled():
            weights = self.balancer.counted(weights, index)
        kept = None
        if config.capacity_factor is not None and self.training:
            kept = within_capacity(
                index, num_experts=self.num_experts, factor=config.capacity_factor
            )
        return Routing(index, weights, kept, self._auxiliary(logits, scores, index, kept))

    def _auxiliary(
        self, logits: Tensor, scores: Tensor, index: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Return the auxiliary values; those that are not part of the loss have no gradient."""
        config = self.config
        size = self.num_experts
        share = (
            scores if config.router_score == "softmax" else scores / scores.sum(-1, keepdim=True)
        )
        share = share if config.balance == "loss" else share.detach()
        chosen = torch.zeros_like(share).scatter(-1, index, 1 / config.experts_per_token)
        square = (
            (logits if config.z_loss_coefficient else logits.detach())
            .logsumexp(-1, keepdim=True)
            .square()
        )
        dropped = (
            torch.zeros_like(square)
            if kept is None
            else (~kept).to(square.dtype).mean(-1, keepdim=True)
        )
        means = torch.cat((share, chosen, square, dropped), -1).mean(1)
        share_b, chosen_b, z_and_dropped = means.split((size, size, AUXILIARY - 1), -1)
        balance_b = size * torch.linalg.vecdot(chosen_b, share_b).unsqueeze(-1)
        return torch.cat((balance_b, z_and_dropped), -1)


class Mixture(nn.Module):
    """Weighted sum of the chosen experts' outputs, plus the output of the shared part.

    (b, s, h) -> (b, s, h), and (b, 3) of the router.

    Args:
        config: Configuration of the model.
        layer: Number of the layer, for messages.
        shared: Part that all tokens visit.
    """

    def __init__(self, config: GPTConfig, layer: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = ExpertWeights(config, layer)
        self.shared = shared

    def forward(self, x_bsh: Tensor) -> tuple[Tensor, Tensor]:
        index, weights, kept, aux_b3 = self.router(x_bsh)
        inputs = (x.flatten(0, 1) for x in (x_bsh, index, weights))
        options = {} if kept is None else {"kept_nk": kept.flatten(0, 1)}
        y_nh = self.experts(*inputs, **options)
        y_bsh = y_nh.view_as(x_bsh)
        return (y_bsh if self.shared is None else y_bsh + self.shared(x_bsh)), aux_b3
