"""Frames of the user's code, the names in it, and its collectives over all processes."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_ptdp.base.torch_calls import is_mode_frame, outer_frames
from lightning_ptdp.forward.own_forward import HookedForward

TRAINERS = ("lightning", "pytorch_lightning", "lightning_ptdp")
LIBRARIES = (*TRAINERS, "peft", "torchmetrics", "transformers")
_GUARD = (__name__, "lightning_ptdp.strategy.parameter_guard")
_SAVES = {"save", "save_file", "save_model", "dump"}
"""Names of functions that save a state."""


def frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the frames outside of the guard, the innermost first, each with its package."""
    for frame in outer_frames():
        name = str(frame.f_globals.get("__name__"))
        if name not in _GUARD:
            yield name.partition(".")[0], frame


def running_module() -> nn.Module | None:
    """Return the module whose forward runs; None if code of this package runs inside, or none."""
    for package, frame in frames():
        function = frame.f_code.co_name
        if function == "_call_impl":
            return frame.f_locals["self"]
        is_passed = isinstance(frame.f_locals.get("self"), HookedForward)
        if package == "lightning_ptdp" and not is_mode_frame(frame) and not is_passed:
            return None
    return None


def is_allowed_loop() -> bool:
    """Return True if the code that loops over parameters does not compute with them.

    This package does so in a save in a step, and peft where it switches adapters off. A forward of
    peft may add a penalty (AdaLoRA).
    """
    is_peft = False
    for package, frame in frames():
        if package == "peft":
            if frame.f_code.co_name == "forward":
                return False
            is_peft = True
        elif package != "torch":
            return is_peft or package == "lightning_ptdp"
    return False


def is_saved() -> bool:
    """Return True if the code that asks for a state saves it."""
    for package, frame in frames():
        if package in TRAINERS:
            return False
        if frame.f_code.co_name == "save_pretrained" or (
            package != "torch" and not _SAVES.isdisjoint(names_in(frame.f_code))
        ):
            return True
    return False


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and the functions inside it."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def names_in_function(function: object) -> set[str]:
    """Return ``names_in`` the code of a function or method; none if it has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return set() if code is None else names_in(code)


def clears_gradients(step: Any) -> bool:
    """Return True if a step clears gradients of the whole module, or by Lightning's optimizers.

    Gradients of another module or optimizer may not belong to the training.
    """
    names = names_in_function(step)
    if "zero_grad" not in names or "automatic_optimization" in names:
        return False
    code = dis.get_instructions(inspect.unwrap(step))
    pairs = pairwise(instruction.argval for instruction in code)
    return "optimizers" in names or ("self", "zero_grad") in pairs


# ---- Collectives of torch.distributed over all processes ---------------------------------------


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
