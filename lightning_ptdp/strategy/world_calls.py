"""Calls of ``torch.distributed`` over all processes in the user's code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
        *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list"),
        *(
            "gather",
            "gather_object",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "scatter",
        ),
    )
)
"""Names of functions that all processes must call, unless another group is passed."""


@contextlib.contextmanager
def refusing_world_calls(refuse: Callable[[str], object]) -> Iterator[None]:
    """Refuse collectives over all processes, when they are called as functions of the module.

    Args:
        refuse: Raises the error for the name of a function.
    """
    with contextlib.ExitStack() as undo:
        for name in COLLECTIVES.intersection(vars(dist)):
            function = getattr(dist, name)
            setattr(dist, name, functools.partial(_call, function, refuse))
            undo.callback(setattr, dist, name, function)
        yield


def _call(
    function: Callable[..., Any], refuse: Callable[[str], object], *args: Any, **kwargs: Any
) -> Any:
    values = (*args, *kwargs.values())
    groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
    if dist.is_initialized() and all(group is dist.group.WORLD for group in groups):
        refuse(f"torch.distributed.{function.__name__}")
    return function(*args, **kwargs)
