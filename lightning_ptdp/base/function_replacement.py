"""Modes that replace or observe the torch functions called by code that is not ours.

Some functions help to interpret a call: its dimensions, and the modules and the line that made it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.nested import iterate_tensors


class Replacing(TorchFunctionMode):
    """Context in which calls of some torch functions go to replacements.

    Calls inside a replacement are not replaced again.

    Args:
        replaced: Function of torch -> function called in its place, with the same arguments.
    """

    def __init__(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(
        self,
        function: Callable,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return self._replaced.get(function, function)(*args, **(kwargs or {}))


# ---- Tracking of partial tensors through the torch functions that users call ---------------------
#
# A rank holds only a part of such a tensor.
#
# If a function returns a tensor in the shape of a part, the result is taken as a part too. This is
# true of elementwise functions. A single number is refused, because it would be that of the part.
# So are functions along a divided dimension, indices into one, and products of parts.


class PartialModelError(PTDPError, ValueError):
    """An operation needs values of the full model, of which a rank holds a part."""


class PartialValues(TorchFunctionMode):
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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and check its result.

        Raises:
            PartialModelError: The result is a number that requires all values.
        """
        kwargs = kwargs or {}
        parts = [tensor for tensor in iterate_tensors((args, kwargs)) if tensor in self._names]
        self.line = calling_line(unless="lightning_ptdp") if parts and self._divided else None
        if self.line is not None:
            self._check_call(getattr(func, "__name__", ""), parts, args, kwargs)
        result = func(*args, **kwargs)
        tensors = iterate_tensors(result) if parts else ()
        sources: Iterable[Sequence[Tensor]] = repeat(parts)
        if getattr(func, "__name__", "").startswith("_foreach_"):  # each from its own tensors
            sources = zip(*(one for one in args if isinstance(one, list | tuple)), strict=True)
        for tensor, given in zip(tensors, sources, strict=False):
            own = [one for one in given if one in self._names]
            if own and tensor not in self._names:
                self._follow(func, own, tensor)
        return result

    def _check_call(
        self, name: str, parts: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        names = [self._names[part] for part in parts]
        known = next((one for one in names if one in self._divided), None)
        needs_all = (
            (name in PRODUCTS and len(parts) > 1)
            or name in _DECOMPOSITIONS
            or (name.startswith("linalg_") and "norm" not in name)
        )
        if known is not None and needs_all:
            raise self._refusal(known, name)
        first = args[0] if args else None
        if not isinstance(first, Tensor) or self._names.get(first) not in self._divided:
            return
        shape, divided = self._divided[self._names[first]]
        dims = indexed_dims(args[1]) if name in _INDICES else named_dims(name, args, kwargs)
        if shape == first.shape and (along := divided.intersection(dims)):
            raise self._refusal(self._names[first], f"{name} along dimension {min(along)}")

    def _follow(self, func: Callable[..., Any], parts: list[Tensor], result: Tensor) -> Tensor:
        """Record that ``result`` is a part too, and return the argument that it resembles."""
        similar = next((part for part in parts if part.shape == result.shape), None)
        if similar is None and (result.numel() == 1 or not all(part.numel() for part in parts)):
            raise self._refusal(self._names[parts[0]], getattr(func, "__name__", str(func)))
        self._names[result] = self._names[parts[0]]
        return parts[0] if similar is None else similar


# ---- Interpretation of a call --------------------------------------------------------------------

_FIRST = (
    "all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum flip glu "
    "log_softmax logcumsumexp logsumexp max mean median min mode nanmean nansum prod softmax sort "
    "std std_mean sum unbind var var_mean"
)
_SECOND = (
    "chunk diff kthvalue linalg_norm linalg_vector_norm norm normalize quantile roll split "
    "tensor_split topk"
)
_DIM_AT = MappingProxyType(
    {**dict.fromkeys(_FIRST.split(), 1), **dict.fromkeys(_SECOND.split(), 2)}
)
"""Functions along dimensions -> position of the argument that names them."""
_INDICES = frozenset(("__getitem__", "__setitem__"))
_DECOMPOSITIONS = frozenset(("svd", "qr", "inverse", "pinverse", "cholesky"))
PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum"))
"""Names of functions that multiply matrices."""
_DEFAULT_DIM = MappingProxyType(
    {
        "normalize": 1,
        **dict.fromkeys(["argsort", "diff", "glu", "kthvalue", "mode", "sort", "topk"], -1),
    }
)


def named_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions along which a function works, counted from 0.

    The result is empty if it works on all of them, or not along dimensions.
    """
    at = _DIM_AT.get(name)
    if at is None or not args or not isinstance(args[0], Tensor):
        return ()
    named = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", _DEFAULT_DIM.get(name))))
    if len(args) > at:
        named = args[at]
    dims = named if isinstance(named, tuple | list) else (named,)
    count = max(args[0].dim(), 1)
    return tuple(dim % count for dim in dims if type(dim) is int)


def indexed_dims(index: object) -> tuple[int, ...]:
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


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward runs, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_size_error(error: RuntimeError) -> bool:
    """Return True for torch's errors about tensors whose sizes do not fit each other."""
    words = (
        "must match",
        "match the broadcast",
        "cannot be multiplied",
        "invalid for input of size",
    )
    return any(one in str(error) for one in words)


def calling_line(unless: str | None = None) -> str | None:
    """Return the file and line of the innermost code outside of torch and of modes.

    The result is None if that code belongs to the package ``unless``.
    """
    torch_folder = os.path.dirname(torch.__file__) + os.sep
    frame = inspect.currentframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith((torch_folder, __file__))
        or frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
    ):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == unless:
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno},"
