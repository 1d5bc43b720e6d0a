"""Parts of torchao's float8 training that this package uses.

torchao is imported on demand; tests/test_fp8.py checks these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

__all__ = ["Recipe", "Role", "make_recipe", "scaled"]

Role = Literal["input", "weight", "grad_output"]


@dataclass(frozen=True)
class Recipe:
    """One of torchao's recipes for a linear layer.

    Attributes:
        config: Casts of the operands (``Float8LinearConfig``).
        products: Products of the operands (``LinearMMConfig``).
        padded: Products that pad the summed dimension to a multiple of 16.
    """

    config: Any
    products: Any
    padded: Any


def make_recipe(name: str, *, emulate: bool) -> Recipe:
    """Return torchao's recipe of this name.

    With ``emulate`` operands are rounded to float8 and multiplied in float32."""
    from torchao.float8 import Float8LinearConfig, LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig.from_recipe_name(name)
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    products, padded = (
        LinearMMConfig(
            *(ScaledMMConfig(emulate, gemm.use_fast_accum, False, pads) for gemm in gemms)
        )
        for pads in (False, True)
    )
    return Recipe(config, products, padded)


def scaled(
    tensor: Tensor, role: Role, dim: Literal[0, -1], recipe: Recipe, *, pads: bool = False
) -> Tensor:
    """Return a matrix in float8 with its scales, as operand of a product.

    Rowwise scaling has one scale for each vector along ``dim``."""
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import GemmInputRole

    cast = getattr(recipe.config, f"cast_config_{role}")
    operand: Tensor = hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        recipe.padded if pads else recipe.products,
        gemm_input_role=GemmInputRole(role),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
        round_scales_to_power_of_2=recipe.config.round_scales_to_power_of_2,
    )
    return operand
