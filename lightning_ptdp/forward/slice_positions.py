"""Recognition of positions that code counts from the start of a slice of the sequence.

``torch.arange(x.size(1))`` counts the tokens of the slice, ``attention_mask.cumsum(-1)`` those that
are not padding, and ``self.encoding[:, : x.size(1)]`` is the first part of a table. Each of them
ignores the slices of the other ranks. So do comparisons with other numbers, as in the mask of a
window or of padding (``torch.arange(n) < lengths[:, None]``). Comparisons of two such positions, as
in a causal mask, are not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ptdp.base.torch_calls import TorchCall, running_modules

_MOVING = "__add__ __floordiv__ __radd__ __rsub__ __sub__ add floor_divide sub"
"""Functions that may change positions by a number."""
_KEEPING = (
    f"{_MOVING} T __abs__ __getitem__ __neg__ abs bfloat16 broadcast_to clamp clamp_ clamp_min clone "
    "contiguous detach double expand expand_as flatten float half index_select int long mT "
    "masked_fill masked_fill_ movedim neg permute relu repeat repeat_interleave reshape squeeze stack "
    "swapaxes t tile to transpose type type_as unsqueeze view where"
)
"""Functions whose result still counts tokens."""
_ARITHMETIC = (
    "__matmul__ __mul__ __pow__ __rmul__ __truediv__ bmm cos div einsum exp ger matmul mul outer pow "
    "sin true_divide"
)
"""Functions that turn positions into features."""
_COMPARING = (
    "__eq__ __ge__ __gt__ __le__ __lt__ __ne__ eq ge greater greater_equal gt le less less_equal lt "
    "ne not_equal"
)
_TRIANGLES = ("tril", "tril_", "triu", "triu_")


@dataclass(frozen=True)
class _Count:
    """Positions that ``line`` counted.

    Attributes:
        is_distance: True for differences of positions.
        moved: Numbers that were added to them.
    """

    line: str
    is_distance: bool = False
    moved: float = 0


class SlicePositions:
    """Numbers of tokens in a slice that are used as positions."""

    def __init__(self) -> None:
        self._counted: Any = WeakIdKeyDictionary()

    def counted_at(
        self, line: str, call: TorchCall, result: Any, tokens: int, length: int
    ) -> str | None:
        """Return the line that counted positions from the start of a slice, if they are used now.

        Args:
            line: Line that makes the call.
            call: The call.
            result: Its result.
            tokens: Number of tokens in the slice.
            length: Number of tokens in the full sequence.
        """
        if not isinstance(result, Tensor):
            return None
        name = call.name
        if name in _COUNTING:
            if _COUNTING[name](call, tokens):
                self._counted[result] = _Count(line)
            return None
        if name in _TRIANGLES and result.shape[-2:] == (tokens, tokens):
            # A band that is narrower than the slice cannot be the mask of an attention.
            return line if tokens <= abs(call.argument(1, "diagonal", 0)) < length else None
        first = call.first
        if (
            name == "__getitem__"
            and isinstance(first, Tensor)
            and _starts_table(first, call.second, tokens)
        ):
            if result.shape[-2:] == (tokens, tokens) and first.size(-1) == first.size(-2):
                return None if _is_causal(first[..., :length, :length]) else line
            if first.is_floating_point():
                return line
            if (first.flatten()[0] != first.flatten()[-1]).item():
                self._counted[result] = _Count(line)
            return None
        counts = [self._counted[x] for x in call.tensors() if x in self._counted]
        uses = bool(counts) and self._uses(call, result, counts, tokens, length)
        return counts[0].line if uses else None

    def _uses(
        self, call: TorchCall, result: Tensor, counts: Sequence[_Count], tokens: int, length: int
    ) -> bool:
        """Return True if a call turns positions into something else."""
        name = call.name
        first = call.first
        if name == "embedding":
            return call.second.size(0) > tokens
        if name == "__getitem__" and first not in self._counted:
            return _is_table(first) and max(first.shape) > tokens
        if name == "__getitem__" and result.dim() < first.dim() and tokens not in result.shape:
            return False  # the length of each sequence, such as ``mask.cumsum(1)[:, -1]``
        if name in _COMPARING.split():
            other = call.second if first in self._counted else first
            return _limits(name, other if len(counts) == 1 else None, counts, length)
        computes = name in _ARITHMETIC.split()
        if computes or call.subject in _KEEPING.split():
            numbers = [abs(x) for x in call.values[:2] if isinstance(x, int | float)]
            self._counted[result] = _Count(
                counts[0].line,
                is_distance=any(one.is_distance for one in counts) or len(counts) > 1,
                moved=max(one.moved for one in counts)
                + (sum(numbers) if name in _MOVING.split() else 0),
            )
        return computes and result.is_floating_point()


def _limits(name: str, other: object, counts: Sequence[_Count], length: int) -> bool:
    """Return True for a comparison with ``other`` that tokens of other slices would change.

    None: two positions are compared.
    """
    if not isinstance(other, int | float | None):
        return True
    distance = max(one.moved for one in counts) + abs(other or 0)
    if other is None or counts[0].is_distance:
        return 1 < distance < length  # ``i < j + 1`` is causal
    if distance == 0:
        return name.strip("_") not in ("ge", "lt")  # of any position
    return distance < length


def _is_causal(table: Tensor) -> bool:
    """Return True for a mask (..., n, n) of causal attention, or with one value."""
    lower = torch.ones(table.shape[-2:], dtype=torch.bool, device=table.device).tril()
    return torch.equal(table, torch.where(lower, table[..., -1:, :1], table[..., :1, -1:]))


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


def _divides(call: TorchCall, tokens: int) -> bool:
    """Return True for a weight of each of n ``tokens``."""
    return bool(call.argument(2, "steps") == tokens)


_COUNTING = MappingProxyType({"arange": _counts, "cumsum": _sums_mask, "linspace": _divides})
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
