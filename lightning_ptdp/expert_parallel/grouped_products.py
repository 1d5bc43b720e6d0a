"""Computation of experts on their rows: a product of consecutive rows with one matrix for each
expert.

Where a module says how it stores what its experts compute, as transformers' do, nothing has to be
sorted, picked or put back here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.shims.torch import grouped_product

__all__ = ["inner_parts", "inner_width", "stores_as_usual", "usual_output"]

_SAID = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
_PARAMETERS = frozenset(
    ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
)


def stores_as_usual(module: nn.Module) -> bool:
    """Return True if a module of experts declares how it stores them, and has nothing else.

    It has ``gate_up_proj`` (E, 2f, h) if ``has_gate``, else ``up_proj`` (E, f, h), and
    ``down_proj`` (E, h, f); with ``is_transposed`` each with its last dimensions exchanged, with
    ``has_bias`` a further (E, ...) named ``..._bias`` for each. Gate and up are halves of 2f if
    ``is_concatenated``, else they take turns; ``_apply_gate`` makes f of 2f."""
    said = all(hasattr(module, name) for name in _SAID) and not getattr(
        module, "has_post_expert_norm", False
    )
    return said and {name for name, _ in nn.Module.named_parameters(module)} <= _PARAMETERS


def inner_width(module: Any) -> int:
    """f."""
    width: int = module.down_proj.size(1 if module.is_transposed else 2)
    return width


def inner_parts(module: Any, name: str) -> tuple[int, tuple[int, ...]] | None:
    """(dimension along the inner width, the parts of it that are split on their own) of a
    parameter; None: it has none."""
    f = inner_width(module)
    if name == "down_proj_bias":
        return None
    if name == "down_proj":
        return (1 if module.is_transposed else 2), (f,)
    dim = 2 if module.is_transposed and not name.endswith("_bias") else 1
    return dim, ((f, f) if module.is_concatenated else (2 * f,)) if module.has_gate else (f,)


def usual_output(
    module: Any,
    rows_rh: Tensor,
    *,
    sizes: list[int],
    ends: Tensor,
    adds_bias: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the output of such a module's experts for rows, (r, h).

    Args:
        module: It.
        rows_rh: By expert.
        sizes: How many each has.
        ends: (experts,) int32 on the rows' device, where those of each end.
        adds_bias: Whether the bias of the last product is added.
        dtype: In which products are computed; None: in the weights'.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    made = _linear(module, first, rows_rh, sizes, ends, module.has_bias, dtype)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    return _linear(module, "down_proj", made, sizes, ends, module.has_bias and adds_bias, dtype)


def _linear(
    module: Any,
    name: str,
    x: Tensor,
    sizes: list[int],
    ends: Tensor,
    has_bias: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    weight = getattr(module, name)
    weight = weight if dtype is None else weight.to(dtype)
    output = grouped_product(
        x.to(weight.dtype), weight if module.is_transposed else weight.mT, sizes=sizes, ends=ends
    )
    if not has_bias:
        return output
    counts = ends.diff(prepend=ends.new_zeros(1))
    return output + getattr(module, f"{name}_bias").to(output.dtype).repeat_interleave(
        counts, dim=0, output_size=sum(sizes)
    )
