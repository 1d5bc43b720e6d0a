"""Quantized parameters of other libraries, and the parts of torchao's float8 training in use.

Parameters are recognized by name, so that no library need be imported. torchao is imported on
demand. tests/huggingface/test_quantized.py and tests/test_fp8.py check the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function


def quantized_parameters(model: object) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that bitsandbytes or torchao has quantized, by name."""
    return {
        name: parameter
        for name, parameter in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if is_quantized(parameter)
    }


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return True if bitsandbytes or torchao has quantized the parameter."""
    return class_of(parameter).__module__.partition(".")[0] in ("bitsandbytes", "torchao")


def class_of(parameter: nn.Parameter) -> Any:
    """Return the class of a parameter while it has its values."""
    return getattr(parameter, "_ptdp_class", type(parameter))


def is_packed(parameter: nn.Parameter) -> bool:
    """Return True for a quantized weight whose elements are a plain tensor of its shape."""
    if "qdata" in vars(parameter):
        return elements_of(parameter).shape == parameter.shape
    return class_of(parameter).__name__ in ("Params4bit", "Int8Params")


def elements_of(parameter: nn.Parameter) -> Tensor:
    """Return the elements of a parameter, without the scales; torchao has them in ``qdata``."""
    elements: Tensor = vars(parameter).get("qdata", parameter)
    return elements.detach()


def set_elements(parameter: nn.Parameter, elements: Tensor) -> None:
    """Replace the elements of a parameter, which keeps its scales."""
    if "qdata" in vars(parameter):
        vars(parameter)["qdata"] = elements
    else:
        parameter.data = elements


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which ``tensor`` consists, such as elements and scales.

    With double quantization, scales are quantized and have scales themselves.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [plain for part in parts for plain in parts_of(part)]
    parts = [tensor, getattr(tensor, "SCB", None)]
    state: Any = getattr(tensor, "quant_state", None)
    while state is not None:
        parts += [state.absmax, state.offset]
        state = state.state2
    return [part for part in parts if part is not None]


def make_dense(model: nn.Module) -> None:
    """Make linear layers of bitsandbytes ordinary ones, with weights on the meta device."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("bitsandbytes"):
            layer.__class__ = nn.Linear
            weight = torch.empty(layer.out_features, layer.in_features, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)


def planned_elements(parameter: nn.Parameter, width: int) -> int:
    """Return the number of elements of ``width`` bytes that take as much memory as a parameter."""
    if not is_quantized(parameter):
        return parameter.numel()
    return sum(part.nbytes for part in parts_of(parameter)) // width


def keep_format(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights on a CPU in evaluations.

    bitsandbytes computes no gradients with repacked weights, even when training continues.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            vars(layer)["support_avx512bf16_for_cpu"] = False


def release(layer: Any) -> None:
    """Leave the only reference to the elements of a packed weight to the parameter."""
    if getattr(layer.weight, "CB", None) is not None:
        layer.init_8bit_state()
        layer.state.CB = None


class PackedProduct(Function):
    """Product with a quantized weight whose graph saves the weight's elements.

    The graph of bitsandbytes refers to them directly, so they could not be freed between a forward
    and its backward. That of torchao saves the weight in the dtype of the product.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Return the product, from input, elements, bias, layer and the layer's own forward."""
        x, elements, _, ctx.layer, product = args
        ctx.save_for_backward(elements)
        if hasattr(ctx.layer.weight, "quant_state"):
            ctx.layer.weight.quant_state.to(x.device)
        if not hasattr(ctx.layer, "state"):
            return product(x)
        ctx.layer.state.CB = elements
        y = product(x)
        ctx.layer.state.CB = None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of input and bias."""
        (gradient,) = gradients
        (elements,) = ctx.saved_tensors
        layer = ctx.layer
        weight = _dense(layer, elements)
        dtype = getattr(layer, "compute_dtype", None) or gradient.dtype
        of_input = (gradient.to(dtype) @ weight.to(dtype)).to(gradient.dtype)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None, None


def _dense(layer: Any, elements: Tensor) -> Tensor:
    """Return the weight of a layer in floating point."""
    weight = layer.weight
    if hasattr(layer, "state"):
        return elements * (layer.state.SCB / 127.0)[:, None]
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(elements, weight.quant_state)
    kind = class_of(weight)
    names, attributes = kind.__tensor_flatten__(weight)
    parts = {name: getattr(weight, name) for name in names} | {"qdata": elements}
    whole: Any = kind.__tensor_unflatten__(parts, attributes, weight.shape, weight.stride())
    return whole.dequantize()


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

    With ``emulate`` operands are rounded to float8 and multiplied in float32.
    """
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

    Rowwise scaling has one scale for each vector along ``dim``.
    """
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import GemmInputRole

    cast = getattr(recipe.config, f"cast_config_{role}")
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        recipe.padded if pads else recipe.products,
        gemm_input_role=GemmInputRole(role),
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
        round_scales_to_power_of_2=recipe.config.round_scales_to_power_of_2,
    )


def weight_scale(largest: Tensor, recipe: Recipe) -> Tensor:
    """Return the scales of weights with these largest magnitudes, float32."""
    from torchao.float8.float8_utils import amax_to_scale

    dtype = recipe.config.cast_config_weight.target_dtype
    return amax_to_scale(largest, dtype, recipe.config.round_scales_to_power_of_2)


def rounded_weight(values: Tensor, scale: Tensor, recipe: Recipe) -> Tensor:
    """Return values of a weight in float8."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    dtype = recipe.config.cast_config_weight.target_dtype
    return hp_tensor_and_scale_to_float8(values, scale, dtype)._data


def weight_operand(rounded: Tensor, scale: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """Return a weight that is in float8, and was in ``dtype``, as operand of a product."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    return Float8TrainingTensor(rounded, scale, dtype, recipe.products, GemmInputRole.WEIGHT)
