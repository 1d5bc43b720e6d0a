"""Quantized parameters of other libraries, and the parts of torchao's float8 training in use.

Parameters are recognized by name, so that no library need be imported. torchao is imported on
demand. tests/huggingface/test_quantized.py and tests/test_fp8.py check the names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn


def quantized_parameters(model: object) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that bitsandbytes or torchao has quantized, by name."""
    return {
        name: parameter
        for name, parameter in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if type(parameter).__module__.partition(".")[0] in ("bitsandbytes", "torchao")
    }


def scales_of(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Yield the scales of a weight of bitsandbytes, which it holds beside its elements.

    With double quantization, scales are quantized and have scales themselves.
    """
    state: Any = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (value for value in (state.absmax, state.offset) if value is not None)
        state = state.state2


def is_four_bit(parameter: nn.Parameter) -> bool:
    """Return True for a weight of bitsandbytes' ``Linear4bit``, which has plain bytes."""
    return type(parameter).__name__ == "Params4bit"


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
