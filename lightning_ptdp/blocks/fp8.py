"""Linear layers of the repeated blocks with products in float8, by torchao's recipes.

Activations, weights and gradients keep their types. Each of a layer's three products first rounds
its two operands to 8 bits. The scale maps the largest magnitude of the operand ("tensorwise"),
or of each of its rows ("rowwise"), to the largest number in float8.

Under tensor parallelism a rank scales its own operands; for a shard it uses the maximum of the
shard. Transformer Engine under Megatron does the same. (torchtitan takes the maximum over the
group, with a collective before every product.) The maximum of a shard is never larger than that of
the whole operand. Results are therefore no less exact than in one process, but rounded
differently. Operands that are not sharded are scaled as in one process: the input of a column layer
and the gradient of a row layer, which are gathered in full precision under sequence parallelism.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ptdp.base.requirements import check_installed
from lightning_ptdp.blocks.local_blocks import local_blocks
from lightning_ptdp.forward.deferred_weight_gradients import Products, multiply
from lightning_ptdp.forward.matrix_product import MatrixProduct, add_to_gradient, rows
from lightning_ptdp.forward.own_forward import OwnForward, replace_forward
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.shims.quantization import Recipe, make_recipe, scaled, weight_operand
from lightning_ptdp.tensor_parallel import Column, Kind, Row
from lightning_ptdp.tensor_parallel.kinds.kind import has_own_forward
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import (
    is_conv1d,
    is_linear,
    output_input_sizes,
)
from lightning_ptdp.tensor_parallel.kinds.sharded_attention import ParallelMultiheadAttention
from lightning_ptdp.tensor_parallel.linear import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
)

Float8Scaling = Literal["tensorwise", "rowwise"]

_UNIT = 16
_LEAST_CAPABILITY = (8, 9)
_INDEX = re.compile(r"\.\d+\.")


@dataclass(eq=False)
class RoundedWeight:
    """A weight in float8 with its scale, as the replicas that share it gather it.

    Attributes:
        recipe: Recipe of the rounding.
        fetch: Gathers the values.
        used: Products use these values; otherwise they round the weight itself.
        values: In the weight's shape, float8; None while they are freed.
        scale: () float32, by which the weight was multiplied before it was rounded.
    """

    recipe: Recipe
    fetch: Callable[[], None] = field(init=False)
    used: bool = True
    values: Tensor | None = None
    scale: Tensor | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Return values and scale; values that are freed are gathered."""
        if self.values is None:
            self.fetch()
        assert self.values is not None
        assert self.scale is not None
        return self.values, self.scale


@dataclass(frozen=True, eq=False)
class Float8Product(MatrixProduct):
    """Product y = x W^T and its gradients, of operands rounded to float8.

    Attributes:
        recipe: Recipe of the rounding.
        rounded: The weight as its replicas gather it; None: the weight itself is rounded.
    """

    recipe: Recipe = field(kw_only=True)
    rounded: RoundedWeight | None = field(kw_only=True, default=None)

    def output(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias."""
        with torch.autocast(x.device.type, enabled=False):
            y = scaled(rows(x), "input", -1, self.recipe).mm(self._weight(0))
            y = y if bias is None else y.add_(bias.to(y.dtype))
        return y.view(*x.shape[:-1], y.size(-1))

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input, (..., i), from that of the output, (..., o)."""
        weight = self._weight(-1)
        product = scaled(rows(grad), "grad_output", -1, self.recipe).mm(weight.t())
        return product.view(*grad.shape[:-1], weight.size(0))

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, in the weight's shape.

        Args:
            grad: Gradient of the output, (..., o).
            x: Input, (..., i).
        """
        grad = rows(grad)
        pads = grad.size(0) % _UNIT != 0
        left = scaled(grad, "grad_output", 0, self.recipe, pads=pads)
        right = scaled(rows(x), "input", 0, self.recipe, pads=pads)
        product = left.t().mm(right)
        return product.t() if self.transposed else product

    def add_weight_gradient(self, grad: Tensor, x: Tensor) -> None:
        """Add ``weight_gradient`` to ``weight.grad``."""
        add_to_gradient(self.weight, self.weight_gradient(grad, x))

    def _weight(self, dim: Literal[0, -1]) -> Tensor:
        """Return the weight as (i, o) in float8."""
        if self.rounded is not None and self.rounded.used:
            values, scale = self.rounded.read()
            values = values if self.transposed else values.t()
            return weight_operand(values, scale, self.weight.dtype, self.recipe)
        weight = self.weight.detach()
        return scaled(weight if self.transposed else weight.t(), "weight", dim, self.recipe)


@dataclass(frozen=True, eq=False, kw_only=True)
class Float8Linear(OwnForward):
    """Forward of a layer that is not split.

    Attributes:
        products: Makes the layer's products.
    """

    products: Products

    def __call__(self, x: Tensor) -> Tensor:
        """Run the layer's forward."""
        layer: Any = self.module
        store = layer.weight_gradients
        transposed = is_conv1d(layer)
        return multiply(
            x, layer.weight, layer.bias, products=self.products, transposed=transposed, store=store
        )


def check_fp8(
    module: nn.Module,
    *,
    blocks: Blocks | None,
    kinds: Mapping[str, Kind],
    tensor_parallel_size: int,
) -> None:
    """Check the whole, uncut module before launch; it may be on the meta device.

    Args:
        module: The module.
        blocks: Dotted names of the repeated containers; found if None.
        kinds: Kinds of the modules that tensor parallelism splits.
        tensor_parallel_size: t.

    Raises:
        RequirementError: torchao is missing, or another version than the declared one.
        ValueError: There is no linear layer in the blocks, or one whose sizes are not multiples of
            16.
    """
    check_installed("torchao")
    has_layers = False
    for name, layer in _layers(module, blocks):
        outputs, inputs = output_input_sizes(layer)
        outputs //= tensor_parallel_size if isinstance(kinds.get(name), Column) else 1
        inputs //= tensor_parallel_size if isinstance(kinds.get(name), Row) else 1
        _check_sizes(name, outputs, inputs)
        has_layers = True
    if not has_layers:
        raise ValueError(
            "fp8 applies to linear layers of the repeated blocks, but there are none. Use fp8=None"
        )


def apply_fp8(
    module: nn.Module,
    *,
    scaling: Float8Scaling,
    blocks: Blocks | None,
    device: torch.device,
    gather: Callable[[Mapping[nn.Parameter, RoundedWeight]], None] | None = None,
) -> str:
    """Let the linear layers in this rank's blocks multiply in float8, in place.

    Args:
        module: The module after ``parallelize``.
        scaling: The option ``fp8``.
        blocks: Dotted names of the repeated containers; found if None.
        device: Device of the module.
        gather: Called with the weights that replicas may gather in float8: those that all products
            round in the same way.

    Returns:
        A note that names the layers.

    Raises:
        ValueError: The device has no float8, or a rank's part of a layer is not a multiple of 16.
    """
    _check_device(device)
    recipe = make_recipe(scaling, emulate=device.type == "cpu")
    rounded = dict[nn.Parameter, RoundedWeight]()
    names = dict[str, None]()
    for name, layer in _layers(module, blocks):
        weight = layer.get_parameter("weight")
        _check_sizes(name, *weight.shape)
        if gather is not None and scaling == "tensorwise":
            rounded.setdefault(weight, RoundedWeight(recipe))
        products = partial(Float8Product, recipe=recipe, rounded=rounded.get(weight))
        if isinstance(layer, ParallelLayer):
            layer.products = products
        else:
            vars(layer).setdefault("weight_gradients", None)
            replace_forward(layer, Float8Linear, products=products)
        names[_INDEX.sub(".*.", name)] = None
    if gather is not None:
        gather(rounded)
    return f"fp8={scaling!r} computes in float8: {', '.join(names) or 'no layer on this rank'}"


def _layers(module: nn.Module, blocks: Blocks | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in the local blocks that multiply by a weight.

    Layers that are too small to gain from float8, such as adapters and routers, are left out.
    """
    for block in local_blocks(module, blocks):
        modules = dict(block.module.named_modules(prefix=block.name))
        attentions = {
            name
            for name, child in modules.items()
            if isinstance(child, nn.MultiheadAttention | ParallelMultiheadAttention)
        }
        for name, child in modules.items():
            plain = isinstance(child, ColumnParallelLinear | RowParallelLinear) or (
                is_linear(child) and not has_own_forward(child, nn.Linear)
            )
            if (
                plain
                and name.rpartition(".")[0] not in attentions
                and min(child.get_parameter("weight").shape) >= _UNIT
            ):
                yield name, child


def _check_sizes(name: str, *sizes: int) -> None:
    if any(size % _UNIT for size in sizes):
        raise ValueError(
            f"fp8: the weight of '{name}' has {sizes[0]} x {sizes[1]} elements on a rank, but "
            f"float8 products need multiples of {_UNIT}. Change these sizes, use a smaller "
            "tensor_parallel_size, or use fp8=None"
        )


def _check_device(device: torch.device) -> None:
    if device.type == "cpu":
        warnings.warn(
            "fp8 is emulated on a CPU: the results are as exact as on a GPU, but it is slower "
            "than no fp8",
            stacklevel=2,
        )
    elif (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    ):
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            "fp8 needs a GPU with float8 products (compute capability "
            f"{'.'.join(map(str, _LEAST_CAPABILITY))}), but this {name} has {major}.{minor}. "
            "Use fp8=None with precision='bf16-mixed' or 'bf16-true'"
        )
