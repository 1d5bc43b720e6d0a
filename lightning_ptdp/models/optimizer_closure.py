"""The closure of an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["closure_loss"]


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Call a closure, which computes the gradients, and return its loss; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()
