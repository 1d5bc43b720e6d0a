"""Operations that stand for others while a model is traced.

They read, write and keep as much as those for which they stand, in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.planner.operation_recorder import OperationRecorder
from lightning_ptdp.tensor_parallel import Experts


class replacing_functions(TorchFunctionMode):  # noqa: N801, it is used as a context
    """Attention as one operation, and on accelerators dropout that keeps one byte per element."""

    def __init__(self, recorder: OperationRecorder, *, on_cpu: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._on_cpu = on_cpu

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            arguments = dict(zip(names, args, strict=False)) | kwargs
            self._recorder.attention(
                arguments["query"],
                arguments["key"],
                arguments["value"],
                causal=bool(arguments.get("is_causal")) and arguments.get("attn_mask") is None,
                dropout=arguments.get("dropout_p", 0.0) > 0,
            )
            return _Attention.apply(self._recorder, *(arguments[name] for name in names[:3]))
        if function is nn.functional.dropout and not self._on_cpu:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            if training and not math.isclose(rate, 0.0):
                return torch.native_dropout(args[0] if args else kwargs["input"], rate, True)[0]
        return function(*args, **kwargs)


def replace_modules(model: nn.Module) -> None:
    """Let the model's RMSNorms and experts run in one operation each."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            vars(module)["forward"] = _normed.__get__(module)
        elif Experts().fits(module):
            vars(module)["forward"] = _visited.__get__(module)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Any, *inputs: Tensor) -> Tensor:
        query, _, value = inputs
        ctx.save_for_backward(*inputs)
        ctx.recorder = recorder
        samples, heads, positions, _ = query.shape
        # The heads of a position are neighbours, as in the results of fused kernels.
        return query.new_empty(samples, positions, heads, value.size(3)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.end_pass([gradient])
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


class _Visit(torch.autograd.Function):
    """Use shapes only, because routing depends on values that fake tensors lack."""

    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, weights_nk: Tensor) -> Tensor:
        ctx.save_for_backward(x_nh, weights_nk)
        return torch.empty_like(x_nh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _visited(
    module: nn.Module, x_nh: Tensor, index_nk: Tensor, weights_nk: Tensor, **_: object
) -> Tensor:
    vars(module)["_visits"] = (index_nk.size(-1), x_nh.size(-1))
    result: Tensor = _Visit.apply(x_nh, weights_nk)
    return result


def _normed(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, module.normalized_shape, module.weight)
