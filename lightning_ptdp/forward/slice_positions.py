"""Recognition of positions that code counts from the start of a slice of the sequence.

``torch.arange(x.size(1))`` counts the tokens of the slice, and ``self.encoding[:, : x.size(1)]`` is
the first part of a table. Both are the same on every rank, whose slices are at other places.
Comparisons of such numbers, as in masks, are not reported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ptdp.base.torch_calls import TorchCall, running_modules

_KEEPING = (
    "__add__ __getitem__ __radd__ __rsub__ __sub__ add bfloat16 clone contiguous double expand "
    "expand_as flatten float half long repeat reshape squeeze sub to type type_as unsqueeze view"
)
"""Functions whose result still counts tokens."""
_ARITHMETIC = (
    "__matmul__ __mul__ __pow__ __rmul__ __truediv__ bmm cos div einsum exp ger matmul mul outer pow "
    "sin true_divide"
)
"""Functions that turn positions into features."""


class SlicePositions:
    """Numbers of tokens in a slice that are used as positions."""

    def __init__(self) -> None:
        self._counted: Any = WeakIdKeyDictionary()

    def are_used(self, call: TorchCall, result: Any, tokens: int) -> bool:
        """Return True if a call used positions that are counted from the start of a slice.

        Args:
            call: The call.
            result: Its result.
            tokens: Number of tokens in the slice.
        """
        if not isinstance(result, Tensor):
            return False
        name = call.name
        if name == "arange":
            if _counts(call, tokens):
                self._counted[result] = True
            return False
        first = call.first
        indexes = isinstance(first, Tensor) and name == "__getitem__"
        if indexes and _starts_table(first, call.second, tokens):
            if first.is_floating_point():
                return True
            if (first.flatten()[0] != first.flatten()[-1]).item():
                self._counted[result] = True
            return False
        if not any(tensor in self._counted for tensor in call.tensors()):
            return False
        if name == "embedding":
            return bool(call.second.size(0) > tokens)
        if indexes and first not in self._counted:
            return _is_table(first) and max(first.shape) > tokens
        computes = name in _ARITHMETIC.split()
        if computes or name in _KEEPING.split():
            self._counted[result] = True
        return computes and result.is_floating_point()


def _counts(call: TorchCall, tokens: int) -> bool:
    """Return True for ``arange(tokens)``, however its arguments are passed."""
    given = ("start", "end", "step") if len(call.args) > 1 else ("end",)
    numbers = {"start": 0, "step": 1, **dict(zip(given, call.args, strict=False)), **call.kwargs}
    return (numbers["start"], numbers.get("end"), numbers["step"]) == (0, tokens, 1)


def _starts_table(x: Tensor, index: object, tokens: int) -> bool:
    """Return True if an index takes the first ``tokens`` rows of a longer table."""
    places = index if isinstance(index, tuple) else (index,)
    starts = any(
        isinstance(place, slice)
        and place.stop == tokens
        and place.start in (None, 0)
        and size > tokens
        for place, size in zip(places, x.shape, strict=False)
    )
    return starts and _is_table(x)


def _is_table(x: object) -> bool:
    """Return True for a parameter, or a buffer of a module whose forward runs."""
    return isinstance(x, nn.Parameter) or any(
        x is buffer for module in running_modules() for buffer in module.buffers(recurse=False)
    )
