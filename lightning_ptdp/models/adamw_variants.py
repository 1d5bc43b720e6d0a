"""Variants of AdamW: combined with Muon, and with running means in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class MuonWithAdamW(Optimizer):
    """torch's Muon on the groups with ``"muon": True``, and torch's AdamW on the others.

    Muon orthogonalizes the momentum of each matrix. Its update is scaled to the size of AdamW's, so
    that both take the same learning rate and weight decay (arXiv 2502.16982, section 2.2).

    A sharded optimizer gives each matrix to one replica as a whole, and tensor parallelism gathers
    it for the step. Expert parallelism of matrices is refused.

    Args:
        groups: Parameter groups, with the options of the optimizer that updates them.
        lr: Learning rate.
        betas, eps, weight_decay: Those of AdamW; Muon takes the weight decay too.
        momentum: Decay of Muon's momentum.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        matrix = nn.Parameter(torch.empty(1, 1))
        vector = nn.Parameter(torch.empty(1))
        self._muon = torch.optim.Muon(
            [matrix],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            [vector], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self._muon.param_groups = []
        self._adamw.param_groups = []
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without ``"muon": True``, AdamW updates it."""
        inner = self._muon if param_group.get("muon") else self._adamw
        super().add_param_group({"muon": False} | inner.defaults | param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return the closure's loss."""
        loss = closure_loss(closure)
        inner: Any
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [group for group in self.param_groups if group["muon"] is is_muon]
            inner.state = self.state
            inner.step()
        return loss


_STATES = ("exp_avg", "exp_avg_sq")


class HalfStateAdamW(Optimizer):
    """AdamW (arXiv 1711.05101) with bfloat16 states: 4 bytes per parameter instead of 8.

    A step computes in float32. The states are rounded up or down at random, so that increments
    below their precision add up over the steps (arXiv 2010.06192, section 3).

    Args:
        groups: Parameters, or parameter groups with their own values of these options.
        lr: Learning rate.
        betas, eps, weight_decay: Those of AdamW.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return the closure's loss."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, as torch's AdamW keeps it
            for name in _STATES:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        gradient = gradient.float()
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = (
            state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
        for name, value in zip(_STATES, (mean, square), strict=True):
            # assigned: torch widens states to the parameter's dtype when it loads a checkpoint
            state[name] = round_stochastically(value, step)


def round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Round float32 ``values`` to bfloat16, up or down with probabilities that keep the mean.

    The random bits are a hash of each element's value and ``seed``. Replicas of an element
    therefore round it the same way, and a step repeated from a checkpoint gives the same result.
    """
    bits = values.contiguous().view(torch.int32)
    noise = bits ^ (seed * 0x9E3779B9 & 0x7FFFFFFF)
    for multiplier, shift in ((0x45D9F3B, 16), (0x45D9F3B, 15), (0x2C1B3C6D, 16)):
        noise.bitwise_xor_(noise >> shift).mul_(multiplier)
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    noise.masked_fill_(values.isfinite().logical_not_(), 0)
    return noise.add_(bits).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Call a closure, which computes the gradients, and return its loss; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()
