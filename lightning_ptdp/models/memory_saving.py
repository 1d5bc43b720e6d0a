"""Operations that save only their input for the backward pass.

The backward pass recomputes intermediate results. Under a compiler, plain torch operations are
used: the compiler itself chooses what to save.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["RMSNorm", "swiglu"]


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` that saves only its input and the scale on a CPU.

    torch's own implementation on a CPU saves the input and the normalized input in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        inner = grad * weight.to(scale.dtype)
        grad_x = (inner - normal * (inner * normal).mean(-1, keepdim=True)).mul_(scale)
        grad_weight = normal.mul_(grad).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up; (..., 2 f) -> (..., f)."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_up)
        (gate, up), (grad_gate, grad_up) = gate_up.chunk(2, dim=-1), result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result
