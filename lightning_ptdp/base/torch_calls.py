"""Calls of torch functions by code that is not ours: modes that see them, and their interpretation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.base.nested import iterate_tensors

_ALONG_FIRST = (
    "all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum flip glu "
    "log_softmax logcumsumexp logsumexp max mean median min mode nanmean nansum prod softmax sort "
    "std std_mean sum unbind var var_mean"
)
_ALONG_SECOND = (
    "chunk diff kthvalue linalg_norm linalg_vector_norm norm normalize quantile roll split "
    "tensor_split topk"
)
_DIM_AT = MappingProxyType(
    {**dict.fromkeys(_ALONG_FIRST.split(), 1), **dict.fromkeys(_ALONG_SECOND.split(), 2)}
)
"""Functions along dimensions -> position of the argument that names them."""
_DEFAULT_DIM = MappingProxyType(
    {
        "normalize": 1,
        **dict.fromkeys(["argsort", "diff", "glu", "kthvalue", "mode", "sort", "topk"], -1),
    }
)
PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "einsum"))
"""Functions that multiply matrices."""
OF_FIRST = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))
"""Functions that read only the shape or the dtype of their second argument."""


@dataclass(eq=False, repr=False)
class TorchCall:
    """A call of a function of torch.

    Attributes:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return getattr(self.function, "__name__", "")

    @property
    def subject(self) -> str:
        """Return the name of the function, or of the attribute that it reads."""
        owner = getattr(self.function, "__self__", None) if self.name == "__get__" else None
        # A property of Python has no name until Python 3.13.
        return getattr(owner, "__name__", self.name)

    @property
    def values(self) -> Sequence[Any]:
        """Return the positional arguments, also if the first one is passed as ``input``."""
        return self.args or ([self.kwargs["input"]] if "input" in self.kwargs else [])

    @property
    def others(self) -> Sequence[Any]:
        """Return the positional arguments after the first one."""
        return self.args[1:]

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments without the first argument."""
        if self.args:
            return dict(self.kwargs)
        return {name: value for name, value in self.kwargs.items() if name != "input"}

    @property
    def first(self) -> Any:
        """Return the first argument; None if there is none."""
        return self.args[0] if self.args else self.kwargs.get("input")

    @property
    def second(self) -> Any:
        """Return the second argument in the order of the call; None if there is none."""
        return next(iter((*self.others, *self.options.values())), None)

    @property
    def makes_new(self) -> bool:
        """Return True if the function reads only the shape or the dtype of its first argument."""
        return self.name.startswith("new_") or self.name.endswith("_like")

    @property
    def changes_first(self) -> bool:
        """Return True if the function writes into its first argument, and is no operator."""
        name = self.name
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))

    def tensors(self) -> list[Tensor]:
        """Return the tensors in all arguments."""
        return list(iterate_tensors((self.args, self.kwargs)))

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, position: int, name: str, default: object = None) -> Any:
        """Return an argument that is passed by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def dims(self) -> tuple[int, ...]:
        """Return the dimensions along which the function works, counted from 0.

        The result is empty if it works on all of them, or not along dimensions.
        """
        name = self.name
        at = _DIM_AT.get(name)
        if at is None or not isinstance(self.first, Tensor):
            return ()
        kwargs = self.kwargs
        by_name = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", _DEFAULT_DIM.get(name))))
        named = self.args[at] if len(self.args) > at else by_name
        dims = named if isinstance(named, tuple | list) else (named,)
        count = max(self.first.dim(), 1)
        return tuple(dim % count for dim in dims if type(dim) is int)


class CallMode(TorchFunctionMode):
    """Mode that sees the calls of torch functions inside of it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.observe_call(TorchCall(function, args, kwargs or {}))

    def observe_call(self, call: TorchCall) -> Any:
        """Run a call and return its result, or that of another call in its place."""
        return call.run()


class Replacing(TorchFunctionMode):
    """Context in which calls of some torch functions go to replacements.

    Calls inside a replacement are not replaced again. A compiler can trace this mode.

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


# ---- Callers -------------------------------------------------------------------------------------


def outer_frames() -> Iterator[FrameType]:
    """Yield the frames of the functions that run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_mode_frame(frame: FrameType) -> bool:
    """Return True for a frame of a mode that sees a call, or of this file."""
    code = frame.f_code
    return code.co_filename == __file__ or code.co_name in (
        "__torch_function__",
        "__torch_dispatch__",
        CallMode.observe_call.__name__,
    )


def calling_line(*unless: str) -> str | None:
    """Return the file and line of the innermost code outside of torch and of modes.

    The result is None if that code belongs to one of the packages ``unless``.
    """
    torch_folder = os.path.dirname(torch.__file__) + os.sep
    for frame in outer_frames():
        file = frame.f_code.co_filename
        if file.startswith(torch_folder) or is_mode_frame(frame):
            continue
        if frame.f_globals.get("__name__", "").partition(".")[0] in unless:
            break
        return f"{os.path.basename(file)}, line {frame.f_lineno},"
    return None


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward runs, the innermost first."""
    for frame in outer_frames():
        if frame.f_code.co_name == "_call_impl":
            yield frame.f_locals["self"]


def is_size_error(error: RuntimeError) -> bool:
    """Return True for torch's errors about tensors whose sizes do not fit each other."""
    words = (
        "must match",
        "match the broadcast",
        "cannot be multiplied",
        "invalid for input of size",
    )
    return any(one in str(error) for one in words)
