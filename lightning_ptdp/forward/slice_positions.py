"""Recognition of positions that code counts from the start of a slice of the sequence.

``torch.arange(x.size(1))`` counts the tokens of the slice, ``attention_mask.cumsum(-1)`` those that
are not padding, and ``self.encoding[:, : x.size(1)]`` is the first part of a table. Each of them
ignores the slices of the other ranks. Comparisons of such numbers, as in masks, are not reported.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ptdp.base.torch_calls import TorchCall, running_modules

_KEEPING = (
    "__add__ __getitem__ __radd__ __rsub__ __sub__ add bfloat16 clamp clamp_ clamp_min clone "
    "contiguous double expand expand_as flatten float half int long masked_fill masked_fill_ relu "
    "repeat reshape squeeze sub to type type_as unsqueeze view where"
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

    def counted_at(self, line: str, call: TorchCall, result: Any, tokens: int) -> str | None:
        """Return the line that counted positions from the start of a slice, if they are used now.

        Args:
            line: Line that makes the call.
            call: The call.
            result: Its result.
            tokens: Number of tokens in the slice.
        """
        if not isinstance(result, Tensor):
            return None
        name = call.name
        if name in _COUNTING:
            if _COUNTING[name](call, tokens):
                self._counted[result] = line
            return None
        first = call.first
        indexes = isinstance(first, Tensor) and name == "__getitem__"
        if indexes and _starts_table(first, call.second, tokens):
            if first.is_floating_point():
                return line
            if (first.flatten()[0] != first.flatten()[-1]).item():
                self._counted[result] = line
            return None
        counted = next((self._counted[x] for x in call.tensors() if x in self._counted), None)
        if counted is None:
            return None
        if name == "embedding":
            return counted if call.second.size(0) > tokens else None
        if indexes and first not in self._counted:
            return counted if _is_table(first) and max(first.shape) > tokens else None
        if indexes and result.dim() < first.dim() and tokens not in result.shape:
            return None  # the length of each sequence, such as ``mask.cumsum(1)[:, -1]``
        computes = name in _ARITHMETIC.split()
        if computes or name in _KEEPING.split():
            self._counted[result] = counted
        return counted if computes and result.is_floating_point() else None


def _counts(call: TorchCall, tokens: int) -> bool:
    """Return True for ``arange(tokens)``, however its arguments are passed."""
    given = ("start", "end", "step") if len(call.args) > 1 else ("end",)
    numbers = {"start": 0, "step": 1, **dict(zip(given, call.args, strict=False)), **call.kwargs}
    return (numbers["start"], numbers.get("end"), numbers["step"]) == (0, tokens, 1)


def _sums_mask(call: TorchCall, tokens: int) -> bool:
    """Return True for the running sum of a mask (b, n) over n ``tokens``."""
    x = call.first
    return (
        isinstance(x, Tensor)
        and x.dim() == 2
        and x.size(1) == tokens
        and not x.is_floating_point()
        and call.dims() == (1,)
    )


_COUNTING = MappingProxyType({"arange": _counts, "cumsum": _sums_mask})
"""Functions that count tokens -> whether a call counts those of the slice."""


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
