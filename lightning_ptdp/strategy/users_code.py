"""Frames of the user's code, and the names in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FrameType

from torch import nn

from lightning_ptdp.forward.own_forward import HookedForward

TRAINERS = ("lightning", "pytorch_lightning", "lightning_ptdp")
LIBRARIES = (*TRAINERS, "torchmetrics", "transformers")
_GUARD = (__name__, "lightning_ptdp.strategy.parameter_guard")
_SAVES = {"save", "save_file", "save_model", "dump"}
"""Names of functions that save a state."""


def frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the frames outside of the guard, the innermost first, each with its package."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name not in _GUARD:
            yield name.partition(".")[0], frame
        frame = frame.f_back


def running_module() -> nn.Module | None:
    """Return the module whose forward runs; None if code of this package runs inside, or none."""
    for package, frame in frames():
        function = frame.f_code.co_name
        if function == "_call_impl":
            return frame.f_locals["self"]
        is_passed = isinstance(frame.f_locals.get("self"), HookedForward)
        if package == "lightning_ptdp" and function != "__torch_function__" and not is_passed:
            return None
    return None


def is_called_by_this_package() -> bool:
    """Return True if code of this package, such as a save in a step, loops over parameters."""
    return next(package for package, _ in frames() if package != "torch") == "lightning_ptdp"


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
