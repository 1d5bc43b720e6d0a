"""Tracking of partial tensors through the torch functions that users call.

A rank holds only a part of such a tensor.

If a function returns a tensor in the shape of a part, the result is taken as a part too. This is
true of elementwise functions. A single number is refused, because it would be that of the part. So
are functions along a divided dimension, indices into one, and products of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.torch_calls import PRODUCTS, CallMode, TorchCall, calling_line

_INDICES = frozenset(("__getitem__", "__setitem__"))
_DECOMPOSITIONS = frozenset(("svd", "qr", "inverse", "pinverse", "cholesky"))


class PartialModelError(PTDPError, ValueError):
    """An operation needs values of the full model, of which a rank holds a part."""


class PartialValues(CallMode):
    """Refuses numbers that are computed from parts.

    ``refusal`` makes the error from the name of the parameter and of the function.

    Attributes:
        line: Line of the user's code that calls a function with parts; None: this package does.
    """

    def __init__(self, refusal: Callable[[str, str], PartialModelError]) -> None:
        super().__init__()
        self._refusal = refusal
        self._names: dict[Tensor, str] = {}
        self._divided: dict[str, tuple[torch.Size, frozenset[int]]] = {}
        self.line: str | None = None

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call and check its result.

        Raises:
            PartialModelError: The result is a number that requires all values.
        """
        parts = [tensor for tensor in call.tensors() if tensor in self._names]
        self.line = calling_line("lightning_ptdp") if parts and self._divided else None
        if self.line is not None:
            self._check_call(call, parts)
        result = call.run()
        tensors = iterate_tensors(result) if parts else ()
        sources: Iterable[Sequence[Tensor]] = repeat(parts)
        if call.name.startswith("_foreach_"):  # each from its own tensors
            sources = zip(*(one for one in call.args if isinstance(one, list | tuple)), strict=True)
        for tensor, given in zip(tensors, sources, strict=False):
            own = [one for one in given if one in self._names]
            if own and tensor not in self._names:
                self._follow(call, own, tensor)
        return result

    def _check_call(self, call: TorchCall, parts: list[Tensor]) -> None:
        name = call.name
        names = [self._names[part] for part in parts]
        known = next((one for one in names if one in self._divided), None)
        needs_all = (
            (name in PRODUCTS and len(parts) > 1)
            or name in _DECOMPOSITIONS
            or (name.startswith("linalg_") and "norm" not in name)
        )
        if known is not None and needs_all:
            raise self._refusal(known, name)
        first = call.first
        if not isinstance(first, Tensor) or self._names.get(first) not in self._divided:
            return
        shape, divided = self._divided[self._names[first]]
        dims = _indexed_dims(call.args[1]) if name in _INDICES else call.dims()
        if shape == first.shape and (along := divided.intersection(dims)):
            raise self._refusal(self._names[first], f"{name} along dimension {min(along)}")

    def _follow(self, call: TorchCall, parts: list[Tensor], result: Tensor) -> Tensor:
        """Record that ``result`` is a part too, and return the argument that it resembles."""
        similar = next((part for part in parts if part.shape == result.shape), None)
        if similar is None and (result.numel() == 1 or not all(part.numel() for part in parts)):
            raise self._refusal(self._names[parts[0]], call.name)
        self._names[result] = self._names[parts[0]]
        return parts[0] if similar is None else similar


def _indexed_dims(index: object) -> tuple[int, ...]:
    """Return the dimensions of which an index selects a part, counted from 0.

    The result is empty for a mask of all elements, and if the index has new dimensions or an
    ellipsis.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is None or entry is Ellipsis for entry in entries) or (
        isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 1
    ):
        return ()
    return tuple(
        dim
        for dim, entry in enumerate(entries)
        if not isinstance(entry, slice) or entry != slice(None)
    )
