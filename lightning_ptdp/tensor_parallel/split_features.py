"""Refusal of functions that combine features of which each tensor rank has a part.

The output of a column layer is split along its last dimension. A softmax over it, a norm, or two
halves of it (``x.chunk(2, -1)``) would be those of the part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ptdp.base.function_replacement import (
    PRODUCTS,
    PartialModelError,
    PartialValues,
    named_dims,
)
from lightning_ptdp.forward.surroundings import Context, Forward, Surrounding
from lightning_ptdp.shims.torch import has_compiled_parts
from lightning_ptdp.tensor_parallel.kinds.vocabulary import VocabularyParallelHead
from lightning_ptdp.tensor_parallel.linear import ColumnParallelLinear

_BY_PART = frozenset(("__getitem__", "chunk", "glu", "split", "tensor_split"))
"""Functions that take the parts of a fused layer apart."""


class SplitFeatures(Surrounding):
    """Watch of the outputs of column layers, in the first forward of each kind."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self._module: nn.Module | None = None

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Store the module whose layers are watched."""
        self._seen.clear()
        self._module = None if has_compiled_parts(module) else module
        return super().attach(module)

    def around(self, forward: Forward) -> Context:
        """Watch a forward, if it is the first of its kind."""
        if self._module is None or forward.kind in self._seen:
            return contextlib.nullcontext()
        self._seen.add(forward.kind)
        return _watched(self._module)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    features = _Features()
    with contextlib.ExitStack() as undo:
        for name, layer in model.named_modules():
            if isinstance(layer, ColumnParallelLinear) and not isinstance(
                layer, VocabularyParallelHead
            ):
                undo.enter_context(layer.register_forward_hook(features.note(name)))
        undo.enter_context(features)
        yield


class _Features(PartialValues):
    """Mode that follows outputs of column layers through functions that keep their shape."""

    def __init__(self) -> None:
        super().__init__(self._refused)
        self._names: Any = WeakIdKeyDictionary()
        self._fused: set[str] = set()

    def note(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        """Return a forward hook of the column layer ``name``."""

        def follow(layer: nn.Module, _args: Any, output: Tensor) -> None:
            assert isinstance(layer, ColumnParallelLinear)
            if len(layer.parts) > 1:
                self._fused.add(name)
            self._names[output] = name
            self._divided[name] = (output.shape, frozenset({output.dim() - 1}))

        return follow

    def _check_call(
        self, name: str, parts: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x not in self._names:
            return
        layer = self._names[x]
        if x.shape != self._divided[layer][0] or (name in _BY_PART and layer in self._fused):
            return
        last = x.dim() - 1
        if name in ("layer_norm", "rms_norm"):
            combines = True
        elif name == "__getitem__":
            combines = _takes_block(args[1], x.dim())
        elif name == "pad":
            combines = any(kwargs.get("pad", args[1] if len(args) > 1 else ())[:2])
        else:
            combines = last in named_dims(name, args, kwargs)
        if combines:
            raise self._refusal(layer, name)

    def _follow(self, func: Callable[..., Any], parts: list[Tensor], result: Tensor) -> Tensor:
        name = getattr(func, "__name__", "")
        # The output of the row layer may have the same shape.
        if self.line is None or name == "linear" or name in PRODUCTS:
            return parts[0]
        for part in parts:
            if part.shape == result.shape:
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


def _takes_block(index: object, dims: int) -> bool:
    """Return True if an index takes a range or single places of the last dimension."""
    if not isinstance(index, tuple) or (Ellipsis not in index and len(index) < dims):
        return False
    last = index[-1]
    if isinstance(last, slice):
        return last != slice(None) and (last.step is None or last.stop is not None)
    return last is not None and last is not Ellipsis
