"""Computation of experts on their rows, as grouped matrix products.

Consecutive rows are multiplied by one matrix per expert. If a module declares how it stores its
experts, as transformers' modules do, no rows need to be sorted or selected here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.expert_parallel.dispatch import Dispatched
from lightning_ptdp.forward.matrix_product import StepCasts
from lightning_ptdp.shims.torch import grouped_product

_SAID = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_PARAMETERS = frozenset(
    ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
)


def stores_as_usual(module: nn.Module) -> bool:
    """Return True if a module of experts declares its storage and has no other parameters.

    It has ``gate_up_proj`` (E, 2f, h) if ``has_gate``, else ``up_proj`` (E, f, h), and
    ``down_proj`` (E, h, f). With ``is_transposed`` the last two dimensions of each are exchanged.
    With ``has_bias`` each has a bias (E, ...) named ``..._bias``. Gate and up are halves of 2f if
    ``is_concatenated``, else they are interleaved. ``_apply_gate`` reduces 2f to f.
    """
    declared = all(hasattr(module, name) for name in _SAID) and not getattr(
        module, "has_post_expert_norm", False
    )
    return declared and {name for name, _ in nn.Module.named_parameters(module)} <= _PARAMETERS


def inner_width(module: Any) -> int:
    """Return f, the inner width of an expert."""
    return module.down_proj.size(1 if module.is_transposed else 2)


def inner_parts(module: Any, name: str) -> tuple[int, tuple[int, ...]] | None:
    """Return how a parameter is split along the inner width.

    Returns:
        (dimension along the inner width, its parts that are split on their own); None: it has no
        such dimension.
    """
    f = inner_width(module)
    if name == "down_proj_bias":
        return None
    if name == "down_proj":
        return (1 if module.is_transposed else 2), (f,)
    dim = 2 if module.is_transposed and not name.endswith("_bias") else 1
    if not module.has_gate:
        return dim, (f,)
    return dim, (f, f) if module.is_concatenated else (2 * f,)


def usual_output(
    module: Any,
    routed: Dispatched,
    *,
    adds_bias: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the output (r, h) of such a module's experts for received rows.

    Args:
        module: The module of experts.
        routed: The rows.
        adds_bias: Whether the bias of the last product is added.
        dtype: Dtype of the products; None: the weights' dtype.
    """
    ends = routed.counts.cumsum(0, dtype=torch.int32)

    def linear(name: str, x: Tensor, has_bias: bool) -> Tensor:
        weight = getattr(module, name)
        weight = getattr(module, "step_casts", StepCasts()).cast(weight, dtype)
        matrices = weight if module.is_transposed else weight.mT
        output = grouped_product(x.to(weight.dtype), matrices, sizes=routed.sizes, ends=ends)
        if not has_bias:
            return output
        bias = getattr(module, f"{name}_bias").to(output.dtype)
        return output + bias.repeat_interleave(routed.counts, dim=0, output_size=output.size(0))

    first = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = linear(first, routed.rows_rh, module.has_bias)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    return linear("down_proj", hidden, module.has_bias and adds_bias)
