"""Modes that replace or observe the torch functions called by code that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
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


class PartialModelError(PTDPError, ValueError):
    """An operation needs values of the whole model, of which a rank holds a part."""


class PartialValues(TorchFunctionMode):
    """Refuses numbers that are computed from parts.

    ``refusal`` makes the error from the name of the parameter and of the function.
    """

    def __init__(self, refusal: Callable[[str, str], PartialModelError]) -> None:
        super().__init__()
        self._refusal = refusal
        self._names: dict[Tensor, str] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and check its result.

        Raises:
            PartialModelError: The result is a number that requires the whole values.
        """
        kwargs = kwargs or {}
        parts = [tensor for tensor in iterate_tensors((args, kwargs)) if tensor in self._names]
        result = func(*args, **kwargs)
        for tensor in iterate_tensors(result) if parts else ():
            if tensor not in self._names:
                self._follow(func, parts, tensor)
        return result

    def _follow(self, func: Callable[..., Any], parts: list[Tensor], result: Tensor) -> Tensor:
        """Record that ``result`` is a part too, and return the argument that it resembles."""
        alike = next((part for part in parts if part.shape == result.shape), None)
        if alike is None and (result.numel() == 1 or not all(part.numel() for part in parts)):
            raise self._refusal(self._names[parts[0]], getattr(func, "__name__", str(func)))
        self._names[result] = self._names[parts[0]]
        return parts[0] if alike is None else alike
