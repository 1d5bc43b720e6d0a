"""Pure functions of tensors that run in few kernels on a GPU.

Operations that follow each other on a large tensor cost one pass over memory each. A compiler joins
them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Return the function, compiled for a GPU if the machine has what torch's compiler needs.

    It must be pure and defined at the top level of a module or class: its compiled form is kept for
    the life of the process.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function
    return _compiled(function)


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    if missing_compiler(torch.device("cuda")):
        return function
    # Kernels for dynamic sizes took three to five times as long on an H200. torch itself stops at
    # eight sizes, and runs further ones without compilation.
    return torch.compile(function, dynamic=False)


def missing_compiler(device: torch.device) -> str:
    """Return what torch's own compiler needs on this machine and does not find; "" if nothing."""
    on_gpu = device.type == "cuda"
    chosen, usual = ("CC", ("gcc", "clang", "cc")) if on_gpu else ("CXX", ("g++",))
    names = (os.environ[chosen],) if chosen in os.environ else usual
    missing = []
    if on_gpu and importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    if not any(map(shutil.which, names)):
        missing.append(f"a C{'' if on_gpu else '++'} compiler ({' or '.join(names)})")
    return " and ".join(missing)
