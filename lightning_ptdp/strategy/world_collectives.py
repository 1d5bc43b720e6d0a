"""Collectives of ``torch.distributed`` over all processes in the user's code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_ptdp.strategy.users_code import names_in

_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single "
    "broadcast broadcast_object_list gather gather_object reduce reduce_scatter "
    "reduce_scatter_tensor scatter"
)
_NAMES = frozenset(_COLLECTIVES.split())


@contextlib.contextmanager
def refusing_world_collectives(refuse: Callable[[str], object]) -> Iterator[None]:
    """Refuse collectives over all processes that are called as ``torch.distributed.…``.

    Args:
        refuse: Raises the error for the name of a function.
    """
    with contextlib.ExitStack() as undo:
        for name in (_NAMES | {"barrier"}).intersection(vars(dist)):
            function = getattr(dist, name)
            setattr(dist, name, functools.partial(_call, function, refuse))
            undo.callback(setattr, dist, name, function)
        yield


def collectives_in(frame: FrameType) -> set[str]:
    """Return the names of collectives with data that a function's code calls."""
    names = names_in(frame.f_code)
    found = {name: frame.f_globals[name] for name in names if name in frame.f_globals}
    if "distributed" in names or any(value is dist for value in found.values()):
        return names & _NAMES
    return {name for name, value in found.items() if value is getattr(dist, name, None)} & _NAMES


def _call(
    function: Callable[..., Any], refuse: Callable[[str], object], *args: Any, **kwargs: Any
) -> Any:
    values = (*args, *kwargs.values())
    groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
    if dist.is_initialized() and all(group is dist.group.WORLD for group in groups):
        refuse(f"torch.distributed.{function.__name__}")
    return function(*args, **kwargs)
