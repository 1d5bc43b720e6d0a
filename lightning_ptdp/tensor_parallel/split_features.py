"""Refusal of functions that combine features that are split over tensor ranks.

The output of a column layer is split along its last dimension. A softmax or a norm over it, or a
split into two halves (``x.chunk(2, -1)``), would use only this rank's features, and is refused. So
is a product of queries and keys that have not been split into heads, and a view with as many heads
as the full layer has.

Everything that is computed from the output, up to the next row layer, belongs to this rank alone.
There a parameter of which each rank has a copy gets a part of its gradient, and a tensor of the
full layer's size does not fit. Both are refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.partial_values import PartialModelError, PartialValues
from lightning_ptdp.base.torch_calls import (
    OF_FIRST,
    PRODUCTS,
    TorchCall,
    calling_line,
    is_size_error,
    running_modules,
)
from lightning_ptdp.forward.surroundings import Context, FirstForwards
from lightning_ptdp.shims.torch import has_compiled_parts
from lightning_ptdp.tensor_parallel.kinds.vocabulary import VocabularyParallelHead
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear
from lightning_ptdp.tensor_parallel.named_modules import Numbers, matches

_BY_PART = frozenset(("__getitem__", "chunk", "glu", "split", "tensor_split"))
"""Functions that take the parts of a fused layer apart."""
_CONTRACTIONS = frozenset(("matmul", "__matmul__", "bmm", "scaled_dot_product_attention"))
"""Functions that sum over the last dimension of their first argument."""


class SplitFeatures(FirstForwards):
    """Watches the outputs of column layers during the first forward of each kind.

    Args:
        numbers: Plain attributes that the plan has divided by the number of tensor ranks.
        copies: Parameters of which each tensor rank has a copy, and their names. Those whose
            gradients are summed over the ranks are left out.
    """

    def __init__(self, numbers: Numbers, copies: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._numbers = numbers
        self._copies = copies

    def first(self, module: nn.Module) -> Context:
        """Watch the forward, unless parts of the module are compiled."""
        if has_compiled_parts(module):
            return super().first(module)
        return _watched(module, self._numbers, self._copies)


@contextlib.contextmanager
def _watched(
    model: nn.Module, numbers: Numbers, copies: Mapping[nn.Parameter, str]
) -> Iterator[None]:
    features = _Features(
        {
            (module, key)
            for name, module in model.named_modules()
            for pattern, keys in numbers.items()
            if matches(name, pattern)
            for key in keys
        },
        copies,
    )
    with contextlib.ExitStack() as undo:
        for name, layer in model.named_modules():
            if isinstance(layer, ColumnParallelLinear) and not isinstance(
                layer, VocabularyParallelHead
            ):
                undo.enter_context(layer.register_forward_hook(features.note(name)))
        undo.enter_context(features)
        yield


class _Features(PartialValues):
    """Mode that follows outputs of column layers through functions that keep their shape.

    It also follows the parts of a fused layer.

    Args:
        divided: Modules and their attributes that have this rank's value.
        copies: Parameters of which each rank has a copy, and their names.
    """

    def __init__(
        self, divided: Collection[tuple[nn.Module, str]], copies: Mapping[nn.Parameter, str]
    ) -> None:
        super().__init__(self._refused)
        self._names: Any = WeakIdKeyDictionary()
        self._local: Any = WeakIdKeyDictionary()  # computed from the output of a column layer
        # Also what is computed from them alone.
        self._copied: Any = WeakIdKeyDictionary(dict(copies))
        self._fused: set[str] = set()
        self._numbers = divided
        self._ranks = 1

    def note(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        """Return a forward hook of the column layer ``name``."""

        def follow(layer: nn.Module, _args: Any, output: Tensor) -> None:
            assert isinstance(layer, ColumnParallelLinear)
            self._ranks = layer.group.size
            if len(layer.parts) > 1:
                self._fused.add(name)
            self._names[output] = name
            self._local[output] = name
            self._divided[name] = (output.shape, frozenset({output.dim() - 1}))

        return follow

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call, check its result, and follow what is computed from features and copies.

        Raises:
            PartialModelError: The result is not this rank's part of the full model's.
        """
        tensors = call.tensors()
        if call.name in OF_FIRST:
            tensors = tensors[:1]
        layer = next((self._local[one] for one in tensors if one in self._local), None)
        copied = []
        if torch.is_grad_enabled():
            copied = [
                self._copied[one] for one in tensors if one in self._copied and one.requires_grad
            ]
        # Functions of this package sum the gradients.
        line = calling_line("lightning_ptdp") if layer is not None or copied else None
        try:
            result = super().observe_call(call)
        except RuntimeError as error:
            differ = is_size_error(error) and _differ(tensors, self._ranks)
            if layer is None or line is None or not differ:
                raise
            sizes = " and ".join(str(tuple(one.shape)) for one in tensors)
            raise PartialModelError(
                f"{line} calls {call.name} on tensors {sizes}, which have heads or features of "
                f"'{layer}' of one and of all {self._ranks} tensor ranks. Split a parameter with "
                "Region(heads=..., per_head=(...)) and a bias with Region(heads=..., arguments="
                "(...)), or leave the layer and the row layer after it out of "
                "ParallelPlan(tensor=...)"
            ) from error
        if line is None:
            return result
        if layer is not None and copied:
            raise PartialModelError(
                f"{line} calls {call.name} on features of '{layer}', of which each tensor rank "
                f"has a part, and on '{copied[0]}', of which each has a copy and would get a part of "
                "the gradient. Declare its module as 'partial' in ParallelPlan(tensor=...)"
            )
        is_copy = len(copied) == sum(one.requires_grad for one in tensors)
        for one in iterate_tensors(result):
            if one.requires_grad and layer is not None:
                self._local[one] = layer
            elif one.requires_grad and is_copy:
                self._copied[one] = copied[0]
        return result

    def _check_call(self, call: TorchCall, parts: list[Tensor]) -> None:
        name = call.name
        x = call.first
        if name == "einsum" and isinstance(x, str):
            for part in _contracted(x, call.others):
                if part in self._names:
                    raise self._refusal(self._names[part], name)
        if not isinstance(x, Tensor) or x not in self._names:
            return
        layer = self._names[x]
        if name in ("view", "reshape", "unflatten"):
            self._check_heads(layer, name, x, call.others)
            return
        is_product = name in _CONTRACTIONS and any(other.dim() > 2 for other in call.tensors()[1:])
        is_output = x.shape == self._divided[layer][0]
        if (not is_output and not is_product) or (name in _BY_PART and layer in self._fused):
            return
        last = x.dim() - 1
        if is_product or name in ("layer_norm", "rms_norm"):
            combines = True
        elif name == "__getitem__":
            combines = _takes_block(call.second, x.dim())
        elif name == "pad":
            combines = any(call.argument(1, "pad", ())[:2])
        else:
            combines = last in call.dims()
        if combines:
            raise self._refusal(layer, name)

    def _check_heads(self, layer: str, name: str, x: Tensor, args: Sequence[Any]) -> None:
        """Refuse sizes of the full layer in the place of this rank's."""
        sizes = _sizes(name, x, args)
        known = math.prod(size for size in sizes if size != -1)
        if len(sizes) < 2 or not known:
            return
        rest, excess = divmod(x.numel(), known)
        full = [rest if size == -1 else size for size in sizes]
        keeps = math.prod(x.shape[:-1]) in accumulate(full[:-1], mul)
        is_full = math.prod(full[-2:]) == self._ranks * x.shape[-1]
        if excess or (-1 not in sizes and rest != 1) or (is_full and not keeps):
            raise self._wrong_sizes(layer, name, f"with the sizes {tuple(sizes)}")
        if not keeps or sizes[-2] == -1 or len(sizes) <= x.dim():
            return
        for module in running_modules():
            numbers = {key: value for key, value in vars(module).items() if type(value) is int}
            for name_of_config, config in vars(module).items():
                numbers |= _heads(name_of_config, config)
            key = next((key for key, value in numbers.items() if value == full[-2]), None)
            known_size = full[-1] in (value for other, value in numbers.items() if other != key)
            if known_size or (module, key) in self._numbers:
                return
            if key is not None:
                raise self._wrong_sizes(
                    layer, name, f"with all heads, which {type(module).__name__}.{key} counts,"
                )

    def _wrong_sizes(self, layer: str, function: str, sizes: str) -> PartialModelError:
        return PartialModelError(
            f"{self.line} calls {function} {sizes} on the features of '{layer}', of which each "
            f"tensor rank has a part. Let torch count the heads, as in {function}(..., -1, "
            "head_size), or name the attribute that counts them in ParallelPlan(numbers="
            "{'<module>': {'<attribute>': PerRank()}})"
        )

    def _follow(self, call: TorchCall, parts: list[Tensor], result: Tensor) -> Tensor:
        name = call.name
        # The output of the row layer may have the same shape.
        if self.line is None or name == "linear" or name in PRODUCTS:
            return parts[0]
        for part in parts:
            is_part = name in _BY_PART and self._names[part] in self._fused
            if part.shape == result.shape or (is_part and part.shape[:-1] == result.shape[:-1]):
                self._names[result] = self._names[part]
                return part
        if result.numel() == 1 and result.is_floating_point():
            raise self._refusal(self._names[parts[0]], name)
        return parts[0]

    def _refused(self, layer: str, function: str) -> PartialModelError:
        return PartialModelError(
            f"{self.line} calls {function} over the features of '{layer}', of which each tensor "
            "rank has a part. Declare the parts of a fused layer (Column(parts=(...))), or leave "
            "the layer and the row layer after it out of ParallelPlan(tensor=...)"
        )


def _heads(name: str, config: object) -> dict[str, int]:
    """Return the numbers of heads, and their sizes, in an object with options."""
    options = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return {
        f"{name}.{key}": value
        for key, value in options.items()
        if "head" in str(key) and type(value) is int
    }


def _differ(tensors: Sequence[Tensor], ranks: int) -> bool:
    """Return True if two tensors have a dimension of which only one is that of a single rank."""
    for one, other in combinations(tensors, 2):
        for pair in zip(reversed(one.shape), reversed(other.shape), strict=False):
            factor, rest = divmod(max(pair), max(1, min(pair)))
            if min(pair) > 1 and factor > 1 and not rest and ranks % factor == 0:
                return True
    return False


def _takes_block(index: object, dims: int) -> bool:
    """Return True if an index takes a range or single places of the last dimension."""
    if not isinstance(index, tuple) or (Ellipsis not in index and len(index) < dims):
        return False
    last = index[-1]
    if isinstance(last, slice):
        return last != slice(None) and (last.step is None or last.stop is not None)
    return last is not None and last is not Ellipsis


def _contracted(equation: str, operands: Sequence[Any]) -> list[Tensor]:
    """Return the operands of ``einsum`` whose last dimension is not one of the result's."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    return [
        operand
        for letters, operand in zip(inputs.split(","), operands, strict=False)
        if isinstance(operand, Tensor) and letters[-1:] not in output
    ]


def _sizes(name: str, x: Tensor, args: Sequence[Any]) -> list[int]:
    """Return the sizes that a call of ``view``, ``reshape`` or ``unflatten`` gives to a tensor.

    The list is empty for a dtype, and if another dimension than the last one is split.
    """
    if name == "unflatten":
        return [*x.shape[:-1], *args[1]] if args[:1] in ((-1,), (x.dim() - 1,)) else []
    sizes = list(args[0]) if args and isinstance(args[0], tuple | list) else list(args)
    return sizes if all(type(size) is int for size in sizes) else []
