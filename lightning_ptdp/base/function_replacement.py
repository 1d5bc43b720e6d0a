"""Replacement of torch functions in a model that this package did not write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["Replacing"]


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
