"""Other functions in the place of torch's, in somebody else's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["Replacing"]


class Replacing(TorchFunctionMode):
    """While it is entered, calls of some functions of torch go to others; what these call does not
    come here again.

    Args:
        replaced: Function of torch -> what is called in its place, with the same arguments.
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
